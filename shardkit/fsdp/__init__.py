"""Sharded parameters (ZeRO stage 3)."""

from .fully_shard import fully_shard
from .groups import hybrid_groups
from .optim_state import gather_plain, shard_plain
from .sharded_api import sharding_of
from .torch_methods import register_fsdp_forward_method
from .wrapper import FSDP

__all__ = [
    "FSDP",
    "fully_shard",
    "gather_plain",
    "hybrid_groups",
    "register_fsdp_forward_method",
    "shard_plain",
    "sharding_of",
]
