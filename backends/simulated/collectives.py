"""Collectives as functions of all ranks' tensors, where one thread can reach them all.

Legend: W world size, S one rank's shard numel, N sum of all shards' numel. Lists have one entry a rank.

What the protocol leaves undefined afterwards is overwritten with NaN (integers: the largest value), so that code
which reads it shows it here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from shardkit.backend import ReduceOp

_COMBINE: dict[ReduceOp, Callable[..., torch.Tensor]] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.AVG: torch.add,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.MIN: torch.minimum,
}


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
    reduced = _combine(inputs, op)
    for tensor in inputs:
        spoil(tensor)
    for shard, part in zip(shards, reduced.split(list(sizes)), strict=True):
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
    reduced = _combine([t.reshape(-1) for t in tensors], op)
    for tensor in tensors:
        tensor.copy_(reduced.view(tensor.shape))


def reduce(tensors: Sequence[torch.Tensor], dst: int, op: ReduceOp) -> None:
    """The tensor of ``dst`` becomes the combination of all; the others are overwritten."""
    reduced = _combine([t.reshape(-1) for t in tensors], op)
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


def _combine(tensors: Sequence[torch.Tensor], op: ReduceOp) -> torch.Tensor:
    """A new tensor; in rank order and in the tensors' dtype, so the same on every run."""
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
