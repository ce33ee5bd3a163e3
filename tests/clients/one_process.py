"""What ranks have each for themselves, for the one process that does what they do, one after the other."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn


class BuffersOfRanks:
    """A model's buffers as each of several ranks has them (batch norms see a rank's own batches)."""

    def __init__(self, model: nn.Module, world: int) -> None:
        self._model = model
        self._kept = [self._copies() for _ in range(world)]

    def kept(self, rank: int) -> list[torch.Tensor]:
        """A rank's, in the model's order."""
        return self._kept[rank]

    def _copies(self) -> list[torch.Tensor]:
        return [b.clone() for b in self._model.buffers()]

    def _put(self, values: list[torch.Tensor]) -> None:
        with torch.no_grad():
            for buffer, value in zip(self._model.buffers(), values, strict=True):
                buffer.copy_(value)

    @contextlib.contextmanager
    def of(self, rank: int) -> Iterator[None]:
        """The model has this rank's buffers inside (backward is inside too: it reads them), rank 0's afterwards."""
        self._put(self._kept[rank])
        yield
        self._kept[rank] = self._copies()
        self._put(self._kept[0])

    def follow_first(self) -> None:
        """All ranks have rank 0's from now on."""
        self._kept = [[b.clone() for b in self._kept[0]] for _ in self._kept]
