"""Values of which one rank has all, as they are computed with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch

from ..originals import ViewOfShard
from .base import Store
from .states import GATHERED, RELEASED, State


@final
class Whole(Store):
    """Original parameters are views of the shard, for good; states only say whether a unit uses them."""

    _pointer = 0

    @property
    def gathered(self) -> torch.Tensor:
        return self._flat.param.data

    def attach(self) -> None:
        self._reveal()
        self._show_shard()
        self._conceal()

    def start(self, after: Sequence[torch.Tensor] = ()) -> None:
        self.state = GATHERED
        self._reveal()
        if not self._backend.has_storage or self._flat.param.data.data_ptr() != self._pointer:
            self._show_shard()  # somebody put another tensor in

    def _show_shard(self) -> None:
        values = self._flat.param.data.reshape(-1)
        self.show(values)
        if self._backend.has_storage:
            self._pointer = values.data_ptr()

    def _conceal(self) -> None:
        """Gradients alone: what is read of values is true, and what is written to them is kept."""
        for original in self._originals:
            original.param.__class__ = ViewOfShard

    def _arrive(self, values: torch.Tensor) -> None:
        """Nothing is gathered."""

    def _free(self, keep: bool) -> State:
        self._conceal()
        return RELEASED
