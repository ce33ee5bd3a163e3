"""Reduces the gradients of a flat parameter's original parameters to each rank's shard."""

from __future__ import annotations

from typing import NamedTuple

from ...backend import Group
from ...policy import ReducePolicy
from ...reduction.compression import CompressedAllReduce, format_for
from ..flat_param import FlatParam
from .compressed import CompressedPack
from .lazy import LazyPack
from .pack import GradientPack, Reduction, Replicas, packed_dtype
from .stored import StoredPack
from .whole import WholePack

__all__ = [
    "GradientPack", "LazyPack", "Reduction", "Replicas", "StoredPack", "Way", "WholePack", "packed_dtype",
    "predivide_factor", "way_for",
]  # fmt: skip


class Way(NamedTuple):
    """The way of a flat parameter's gradients to the shard.

    Attributes:
        pack: reduces them within the group.
        replicas: average the results; None where this rank alone holds the shard.
    """

    pack: GradientPack
    replicas: Replicas | None


def way_for(
    flat: FlatParam, replicas: Group | None, reduce: ReducePolicy, divisors: tuple[float, float]
) -> Way:
    """The way for where the shard is now; see :class:`GradientPack`.

    Compressed is what crosses hosts: what replicas exchange, or where there are none what the group does.
    """
    group = flat.group.channel("gradients")
    has_replicas = replicas is not None and replicas.world_size > 1
    blocks = None
    if has_replicas or group.world_size > 1:
        blocks = format_for(reduce.compression, flat.layout.shard_numel, packed_dtype(flat, reduce))
    if group.world_size > 1 and not has_replicas and blocks is not None:
        return Way(CompressedPack(flat, group, reduce, divisors, blocks), replicas)
    if group.world_size == 1 and not has_replicas:  # replicas tell each other by flags who had which gradient
        kind: type[GradientPack] = WholePack
    else:
        kind = StoredPack if group.backend.has_storage else LazyPack
    pack = kind(flat, group, reduce, divisors, blocks)
    if blocks is None or replicas is None:
        return Way(pack, replicas)
    return Way(pack, CompressedAllReduce(replicas, blocks, pack.part_numel, reduce.error_feedback))


def predivide_factor(world_size: int) -> int:
    """The power of two next to the root of the world size that divides it (fairscale's choice)."""
    factor = 1
    while world_size % factor == 0 and world_size / factor > factor:
        factor *= 2
    return factor
