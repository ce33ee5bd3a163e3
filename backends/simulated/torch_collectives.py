"""Collectives of torch's as functions of what all ranks brought; see collectives.py for those of shardkit's.

Lists have one entry a rank. A rank's tensors are views behind autograd's back, see process_group.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from shardkit.errors import ConfigurationError, OutOfStepError

from .collectives import around_the_ring

Tensors = Sequence[torch.Tensor]
_COMBINE: dict[str, Callable[..., torch.Tensor]] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}


def op_name(op: dist.ReduceOp) -> str:
    """How contributions are combined.

    Raises:
        ConfigurationError: simulated ranks don't know it.
    """
    name = str(getattr(op, "op", op)).rpartition(".")[2]
    if name not in _COMBINE:
        raise ConfigurationError(
            f"simulated ranks can't reduce with {name}; there are {', '.join(_COMBINE)}. Multiply before or after "
            "instead"
        )
    return name


def combined(tensors: Tensors, op: str) -> torch.Tensor:
    """[N] each -> [N], added up as gloo does."""

    def combine(some: Sequence[torch.Tensor]) -> torch.Tensor:
        result = some[0].clone()
        for tensor in some[1:]:
            _COMBINE[op](result, tensor, out=result)
        return result

    result = around_the_ring([t.reshape(-1) for t in tensors], combine)
    return result.div_(len(tensors)) if op == "AVG" else result


def all_reduce(tensors: Sequence[Tensors], op: str) -> None:
    """Each tensor becomes the combination of all ranks' tensors in its place; they travel end to end."""
    flat = [
        torch.cat([t.reshape(-1) for t in own]) if len(own) > 1 else own[0].reshape(-1) for own in tensors
    ]
    result = combined(flat, op)
    for own in tensors:
        _fill(own, result)


def reduce(tensors: Tensors, op: str, root: int) -> None:
    tensors[root].copy_(combined(tensors, op).view(tensors[root].shape))


def broadcast(tensors: Sequence[Tensors], root: int) -> None:
    for rank, own in enumerate(tensors):
        for mine, theirs in zip(own, tensors[root], strict=True):
            if rank != root:
                mine.copy_(theirs.reshape(mine.shape))


def all_gather(outputs: Sequence[Sequence[Tensors]], inputs: Sequence[Tensors]) -> None:
    """``outputs[rank][k][source]`` becomes ``inputs[source][k]``."""
    for lists in outputs:
        for k, pieces in enumerate(lists):
            for piece, source in zip(pieces, inputs, strict=True):
                if piece.data_ptr() != source[k].data_ptr() or not piece.numel():
                    piece.copy_(source[k].reshape(piece.shape))


def reduce_scatter(outputs: Tensors, inputs: Sequence[Tensors], op: str) -> None:
    """``outputs[rank]`` becomes the combination of all ranks' ``inputs[...][rank]``."""
    flat = [torch.cat([t.reshape(-1) for t in pieces]) for pieces in inputs]
    _fill(outputs, combined(flat, op))


def gather(outputs: Sequence[Tensors], inputs: Tensors, root: int) -> None:
    for piece, source in zip(outputs[root], inputs, strict=True):
        piece.copy_(source.reshape(piece.shape))


def scatter(outputs: Tensors, inputs: Sequence[Tensors], root: int) -> None:
    for output, piece in zip(outputs, inputs[root], strict=True):
        output.copy_(piece.reshape(output.shape))


def all_to_all(outputs: Sequence[Tensors], inputs: Sequence[Tensors]) -> None:
    """``outputs[rank][source]`` becomes ``inputs[source][rank]``."""
    for receiver, pieces in enumerate(outputs):
        for sender, piece in enumerate(pieces):
            sent = inputs[sender][receiver]
            if sent.numel() != piece.numel():
                raise OutOfStepError(
                    f"in all_to_all rank {sender} sends {sent.numel()} elements to rank {receiver}, which expects "
                    f"{piece.numel()} (ranks within the group)"
                )
    for receiver, pieces in enumerate(outputs):
        for sender, piece in enumerate(pieces):
            piece.copy_(inputs[sender][receiver].reshape(piece.shape))


def _fill(tensors: Tensors, flat: torch.Tensor) -> None:
    """Cuts ``flat`` over the tensors; behind each other, or all of it for each."""
    first = 0
    for tensor in tensors:
        tensor.copy_(flat[first : first + tensor.numel()].view(tensor.shape))
        first += tensor.numel()
