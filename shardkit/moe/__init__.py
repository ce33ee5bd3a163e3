"""Mixture of experts: each token is computed by a few of many experts, which live on different ranks."""

from .gating import Top2Gate, top2gating
from .layer import MOELayer

__all__ = ["MOELayer", "Top2Gate", "top2gating"]
