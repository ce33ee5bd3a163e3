"""Activations that are computed again in place of being kept."""

from .checkpointing import checkpoint_wrapper

__all__ = ["checkpoint_wrapper"]
