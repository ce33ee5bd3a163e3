"""Optimizer state sharded over ranks (ZeRO stage 1)."""

from .optimizer import OSS

__all__ = ["OSS"]
