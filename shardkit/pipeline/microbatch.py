"""What flows through a pipeline: a tensor or a tuple of tensors; mini-batches cut into micro-batches, and back."""

from __future__ import annotations

import torch

from ..errors import ConfigurationError
from .errors import PipeTypeError

Value = torch.Tensor | tuple[torch.Tensor, ...]


def check(input: object) -> None:
    """Refuses what is neither a tensor nor a tuple of tensors.

    Raises:
        PipeTypeError: (a TypeError) names the type found.
    """
    if isinstance(input, tuple):
        for item in input:
            check(item)
    elif not isinstance(input, torch.Tensor):
        raise PipeTypeError(
            f"expected Tensor, but got {type(input).__name__}: a tensor or a tuple of tensors goes into a pipeline, "
            "from stage to stage and out of it"
        )


def split(value: Value, chunks: int) -> list[Value]:
    """Micro-batches along the first dimension, as ``torch.chunk`` cuts it: fewer than asked for if it is short.

    Raises:
        ConfigurationError: tensors of a tuple give different numbers of micro-batches, or there are none.
    """
    if isinstance(value, torch.Tensor):
        return list(value.chunk(chunks))
    pieces = [tensor.chunk(chunks) for tensor in value]
    if not pieces or any(len(p) != len(pieces[0]) for p in pieces):
        raise ConfigurationError(
            f"tensors of sizes {[tuple(t.shape) for t in value]} can't be cut into the same {chunks} micro-batches; "
            "give them one size in their first dimension"
        )
    return list(zip(*pieces, strict=True))


def join(values: list[Value]) -> Value:
    """The mini-batch that these micro-batches are parts of."""
    if len(values) == 1:
        return values[0]
    if isinstance(values[0], torch.Tensor):
        return torch.cat(values)  # type: ignore[arg-type]
    return tuple(torch.cat(pieces) for pieces in zip(*values, strict=True))
