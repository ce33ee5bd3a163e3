"""Values that flow through a pipeline, tensors or tuples of them; mini-batches cut into micro-batches, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import cast

import torch

from ..errors import ConfigurationError
from .partition import PipeTypeError

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
    """Returns micro-batches along the first dimension, as ``torch.chunk`` cuts it: fewer than asked for if it is short.

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
    """Returns the mini-batch that these micro-batches are parts of."""
    if len(values) == 1:
        return values[0]
    if isinstance(values[0], torch.Tensor):
        return torch.cat(values)  # type: ignore[arg-type]
    return tuple(torch.cat(pieces) for pieces in zip(*values, strict=True))


class Batch:
    """A tensor or a tuple of tensors (one micro-batch), as a sequence of tensors either way.

    Attributes:
        value: the tensor or tensors.
        atomic: whether it is a single tensor.
    """

    def __init__(self, value: Value, index: int) -> None:
        self.value = value
        self.atomic = isinstance(value, torch.Tensor)
        self._index = index

    @property
    def index(self) -> int:
        """Tells which micro-batch this is."""
        return self._index

    @property
    def tensor(self) -> torch.Tensor:
        """Returns the tensor. Raises AttributeError if this is a tuple."""
        if not self.atomic:
            raise AttributeError("not atomic batch")
        return cast(torch.Tensor, self.value)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Returns the tensors. Raises AttributeError if this is a single one."""
        if self.atomic:
            raise AttributeError("batch is atomic")
        return cast(tuple[torch.Tensor, ...], self.value)

    @property
    def tensor_or_tensors(self) -> Value:
        """Returns the tensor or tensors."""
        return self.value

    def call(self, function: Callable[[Value], Value]) -> Batch:
        """Returns a batch of what the function makes of the tensor or tensors."""
        return Batch(function(self.value), self.index)

    def __repr__(self) -> str:
        return f"Batch[atomic={self.atomic!r}]({self.value!r})"

    def _listed(self) -> list[torch.Tensor]:
        return [self.tensor] if self.atomic else list(self.tensors)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self._listed())

    def __len__(self) -> int:
        return len(self._listed())

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.atomic and index != 0:
            raise IndexError("atomic batch allows index 0 only")
        return self._listed()[index]

    def __setitem__(self, index: int | slice, value: Value) -> None:
        if isinstance(index, slice):
            if index != slice(None):
                raise NotImplementedError("only slice [:] supported")
            if self.atomic and len(value) != 1:
                raise IndexError("atomic batch cannot be replaced with multiple tensors")
            self.value = value[0] if self.atomic else cast(tuple[torch.Tensor, ...], value)
            return
        if self.atomic and index != 0:
            raise IndexError("atomic batch allows index 0 only")
        listed = self._listed()
        listed[index] = cast(torch.Tensor, value)
        self.value = listed[0] if self.atomic else tuple(listed)
