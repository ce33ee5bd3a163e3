"""Gradients that end at the rank that owns the parameter (ZeRO stage 2)."""

from .wrapper import ShardedDDP

__all__ = ["ShardedDDP"]
