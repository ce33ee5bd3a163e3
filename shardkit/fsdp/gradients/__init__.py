"""Reduces the gradients of a flat parameter's original parameters to each rank's shard."""

from __future__ import annotations

import torch

from ...backend import Group
from ..flat_param import FlatParam
from .lazy import LazyPack
from .pack import GradientPack, Reduction
from .stored import StoredPack
from .whole import WholePack

__all__ = ["GradientPack", "LazyPack", "Reduction", "StoredPack", "WholePack", "pack_for", "predivide_factor"]


def pack_for(
    flat: FlatParam, group: Group, reduce_dtype: torch.dtype | None, divisors: tuple[float, float]
) -> GradientPack:
    """The pack for where the shard is now; see :class:`GradientPack`."""
    if group.world_size == 1:
        return WholePack(flat, group, reduce_dtype, divisors)
    kind = StoredPack if group.backend.has_storage else LazyPack
    return kind(flat, group, reduce_dtype, divisors)


def predivide_factor(world_size: int) -> int:
    """The power of two next to the root of the world size that divides it (fairscale's choice)."""
    factor = 1
    while world_size % factor == 0 and world_size / factor > factor:
        factor *= 2
    return factor
