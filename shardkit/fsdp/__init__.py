"""Sharded parameters (ZeRO stage 3)."""

from .groups import hybrid_groups
from .wrapper import FSDP

__all__ = ["FSDP", "hybrid_groups"]
