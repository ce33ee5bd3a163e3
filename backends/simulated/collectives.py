"""Collectives as functions of all ranks' tensors, where one thread can reach them all.

Legend: W world size, S one rank's shard numel, N sum of all shards' numel. Lists have one entry a rank.

Sums are added up in the order in which gloo, and shardkit on top of it, add them: results equal those of processes to
the bit.

What the protocol leaves undefined afterwards is overwritten with NaN (integers: the largest value), so that code
which reads it shows it here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from shardkit.backend import ReduceOp

from ..c10d.payloads import Exchange

_COMBINE: dict[ReduceOp, Callable[..., torch.Tensor]] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.AVG: torch.add,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.MIN: torch.minimum,
}
_SEGMENT = 2**20  # bytes; gloo sends larger parts in several


def all_gather(
    outputs: Sequence[torch.Tensor],  # [N]
    shards: Sequence[torch.Tensor],  # [S], may be a slice of its rank's output
    sizes: Sequence[int],
) -> None:
    """Every output becomes the shards in rank order."""
    for output in outputs:
        for piece, shard in zip(output.split(list(sizes)), shards, strict=True):
            if piece.data_ptr() != shard.data_ptr():
                piece.copy_(shard)


def reduce_scatter(
    shards: Sequence[torch.Tensor],  # [S]
    inputs: Sequence[torch.Tensor],  # [N], overwritten
    sizes: Sequence[int],
    op: ReduceOp,
) -> None:
    """Each shard becomes the combination of all ranks' parts for it."""
    parts = [tensor.split(list(sizes)) for tensor in inputs]
    world_size, counts = len(sizes), tuple(sizes)
    reduced = []
    for rank in range(world_size):
        in_rounds = Exchange(rank, counts).in_rounds  # one partner after the other; else all together
        ranks = [(rank - d) % world_size for d in range(world_size)] if in_rounds else range(world_size)
        own = [parts[r][rank] for r in ranks]
        if in_rounds or world_size < 3 or op in (ReduceOp.MAX, ReduceOp.MIN):
            reduced.append(_combine(own, op))
        else:
            total = torch.stack(own).sum(0, dtype=own[0].dtype)
            reduced.append(total.div_(world_size) if op is ReduceOp.AVG else total)
    for tensor in inputs:
        spoil(tensor)
    for shard, part in zip(shards, reduced, strict=True):
        shard.copy_(part)


def all_to_all(
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    output_sizes: Sequence[Sequence[int]],
    input_sizes: Sequence[Sequence[int]],
) -> None:
    """Piece j of rank i's input becomes piece i of rank j's output."""
    sent = [tensor.split(list(sizes)) for tensor, sizes in zip(inputs, input_sizes, strict=True)]
    for receiver, (output, sizes) in enumerate(zip(outputs, output_sizes, strict=True)):
        for sender, piece in enumerate(output.split(list(sizes))):
            piece.copy_(sent[sender][receiver])


def all_reduce(tensors: Sequence[torch.Tensor], op: ReduceOp) -> None:
    """Every tensor (any shape, same numel) becomes the combination of all."""
    reduced = around_the_ring([t.reshape(-1) for t in tensors], lambda some: _combine(some, op))
    for tensor in tensors:
        tensor.copy_(reduced.view(tensor.shape))


def reduce(tensors: Sequence[torch.Tensor], dst: int, op: ReduceOp) -> None:
    """The tensor of ``dst`` becomes the combination of all; the others are overwritten."""
    reduced = around_the_ring([t.reshape(-1) for t in tensors], lambda some: _combine(some, op))
    for rank, tensor in enumerate(tensors):
        if rank == dst:
            tensor.copy_(reduced.view(tensor.shape))
        else:
            spoil(tensor)


def broadcast(tensors: Sequence[torch.Tensor], src: int) -> None:
    """Every tensor becomes the one of ``src``."""
    for rank, tensor in enumerate(tensors):
        if rank != src:
            tensor.copy_(tensors[src].reshape(tensor.shape))


def around_the_ring(
    tensors: Sequence[torch.Tensor], combine: Callable[[Sequence[torch.Tensor]], torch.Tensor]
) -> torch.Tensor:
    """What gloo's all-reduce makes of 1-D tensors: each rank's chunk goes around a ring, and is added to on its way."""
    world_size, numel = len(tensors), tensors[0].numel()
    if world_size < 3:
        return combine(tensors)
    result = torch.empty_like(tensors[0])
    chunk = _ring_chunk(numel, tensors[0].element_size(), world_size)
    for owner, first in enumerate(range(0, numel, chunk)):
        around = [tensors[(owner - d) % world_size] for d in range(1, world_size + 1)]
        result[first : first + chunk] = combine([t[first : first + chunk] for t in around])
    return result


def _ring_chunk(numel: int, itemsize: int, world_size: int) -> int:
    """How many elements of an all-reduce end on one rank: a number of segments of equal size."""
    largest = max(1, _SEGMENT // itemsize)
    segments = max(_ceil(numel, largest), 2 * world_size)
    segments = _ceil(segments, world_size) * world_size
    return max(1, segments // world_size * _ceil(numel, segments))


def _ceil(number: int, divisor: int) -> int:
    return (number + divisor - 1) // divisor


def _combine(tensors: Sequence[torch.Tensor], op: ReduceOp) -> torch.Tensor:
    """A new tensor; in the order given and in the tensors' dtype, so the same on every run."""
    result = tensors[0].clone()
    for tensor in tensors[1:]:
        _COMBINE[op](result, tensor, out=result)
    return result.div_(len(tensors)) if op is ReduceOp.AVG else result


def spoil(tensor: torch.Tensor) -> None:
    """Values that nobody may read: NaN, and the largest of integers."""
    if tensor.layout is not torch.strided or tensor.is_meta or not tensor.numel():
        return
    with torch.no_grad():
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            tensor.fill_(float("nan"))
        elif tensor.dtype is not torch.bool:
            tensor.fill_(torch.iinfo(tensor.dtype).max)
