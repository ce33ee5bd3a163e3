"""Sharded parameters (ZeRO stage 3)."""

from .fully_shard import fully_shard
from .groups import hybrid_groups
from .sharded_api import sharding_of
from .wrapper import FSDP

__all__ = ["FSDP", "fully_shard", "hybrid_groups", "sharding_of"]
