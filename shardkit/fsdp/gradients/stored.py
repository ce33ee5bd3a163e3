"""Gradients where tensors own memory."""

from __future__ import annotations

from itertools import compress

import torch

from ...reduction.packing import WrittenPack
from .pack import GradientPack, Reduction


class StoredPack(GradientPack):
    """Packs into a buffer [W * (S + F)] whose memory exists while it is in use."""

    def _lay_out(self) -> None:
        flat = self._flat
        self._packed = torch.empty(self._form.starts[-1], dtype=self._dtype, device=self._device)
        self._pack = WrittenPack(self._form, self._packed, [m.shape for m in flat.originals])
        self._group.backend.release_storage(self._packed)

    def _reduce(self, gradients: list[torch.Tensor | None]) -> Reduction:
        had = [g is not None for g in gradients]
        self._group.backend.take_storage(self._packed)
        had_all = False not in compress(had, self.trainable)
        self._pack.write(gradients, None if had_all else had)
        gradients.clear()
        return self._scatter(self._packed, had, had_all)

    def _arrived(self) -> None:
        self._group.backend.release_storage(self._packed)

    def _anywhere(self, had: list[bool], result: torch.Tensor) -> list[bool]:
        return self._form.anywhere(had, result, self._group.rank)
