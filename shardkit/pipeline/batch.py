"""A micro-batch, as a sequence of tensors, with its place among the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import cast

import torch

from .microbatch import Value


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
        """Which micro-batch this is."""
        return self._index

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor. Raises AttributeError if this is a tuple."""
        if not self.atomic:
            raise AttributeError("not atomic batch")
        return cast(torch.Tensor, self.value)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensors. Raises AttributeError if this is a single one."""
        if self.atomic:
            raise AttributeError("batch is atomic")
        return cast(tuple[torch.Tensor, ...], self.value)

    @property
    def tensor_or_tensors(self) -> Value:
        """What it was made of."""
        return self.value

    def call(self, function: Callable[[Value], Value]) -> Batch:
        """A batch of what the function makes of the tensor or tensors."""
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
