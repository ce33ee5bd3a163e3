"""Gradients of which one rank has all."""

from __future__ import annotations

from itertools import compress
from typing import final

import torch

from ...backend import Group
from ...reduction.packing import JoinedPack
from ..flat_param import FlatParam
from .pack import GradientPack, Reduction


@final
class WholePack(GradientPack):
    """Nothing is sent, but for replicas."""

    def __init__(
        self, flat: FlatParam, group: Group, reduce_dtype: torch.dtype | None, divisors: tuple[float, float]
    ) -> None:
        super().__init__(flat, group, reduce_dtype, divisors)
        self._pack = JoinedPack(self._form, flat.layout.numels)

    def _reduce(self, gradients: list[torch.Tensor | None]) -> Reduction:
        had = [g is not None for g in gradients]
        had_all = False not in compress(had, self.trainable)
        return Reduction(had, had_all, self._pack.join(gradients, None, self._like), None)

    def _arrived(self) -> None:
        """Nothing was sent."""
