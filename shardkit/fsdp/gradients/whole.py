"""Gradients of which one rank has all."""

from __future__ import annotations

from itertools import compress
from typing import final

import torch

from ...reduction.packing import JoinedPack
from .pack import GradientPack, Reduction


@final
class WholePack(GradientPack):
    """Nothing is sent."""

    def _lay_out(self) -> None:
        self._pack = JoinedPack(self._form, self._flat.layout.numels)
        self.part_numel = sum(self._form.first_flag)  # no flags are sent

    def _reduce(self, gradients: list[torch.Tensor | None]) -> Reduction:
        had = [g is not None for g in gradients]
        had_all = False not in compress(had, self.trainable)
        return Reduction(had, had_all, self._pack.join(gradients, None, self._like), None)

    def _arrived(self) -> None:
        """Nothing was sent."""
