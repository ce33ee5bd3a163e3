"""Sharded parameters (ZeRO stage 3)."""

from .wrapper import FSDP

__all__ = ["FSDP"]
