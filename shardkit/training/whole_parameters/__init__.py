"""Optimizers that need whole parameters, over sharded ones (any torch optimizer, exact under ZeRO stage 3)."""

from .optimizer import WholeParameters

__all__ = ["WholeParameters"]
