"""Gradients where a compiler decides when they exist, so that all ranks have to build one program.

Legend: W world size, S shard numel, F flags in one rank's part.
"""

from __future__ import annotations

from itertools import compress
from typing import final

import torch

from ...reduction.packing import JoinedPack
from ..originals import Listing
from .pack import GradientPack, Reduction


@final
class LazyPack(GradientPack):
    """Packs by concatenation, without writing into parts of a tensor: [W * S], or [W * (S + F)] with flags.

    Flags are there if a gradient is missing. Another rank that misses none sends none; the two run different programs
    then, and are out of step. Which original parameters had one is not known here, but data: see ``unused.py``.
    """

    def _lay_out(self) -> None:
        self._pack = JoinedPack(self._form, self._flat.layout.numels)

    def _reduce(self, gradients: list[torch.Tensor | None]) -> Reduction | None:
        had = [g is not None for g in gradients]
        if True not in had:  # on no rank, or they are out of step
            return None
        had_all = False not in compress(had, self.trainable)
        packed = self._pack.join(gradients, None if had_all else had, self._like)
        gradients.clear()
        return self._scatter(packed, had, had_all)

    def _arrived(self) -> None:
        """The compiler frees what was sent."""

    def _note(self, had: list[bool], had_all: bool, result: torch.Tensor) -> bool:
        """As :meth:`GradientPack._note`, but for elements, and as data."""
        flat, used = self._flat, None
        if not had_all or False in self.trainable:
            rank = self._group.rank
            flags = result.new_ones(self._form.flags[rank]) if had_all else result[flat.layout.shard_numel :]
            used = self._pack.used_elements(flags, rank)
        flat.unused.note_elements(used, flat.param.grad is None)
        return True

    def clear_unused(self, listing: Listing) -> None:
        """As :meth:`GradientPack.clear_unused`, for elements."""
        size = self._flat.layout.shard_numel
        self._flat.unused.clear(torch.zeros(size, dtype=torch.bool, device=self._device))  # no transfer

    def _own(self, result: torch.Tensor) -> torch.Tensor:
        return super()._own(result).clone()  # else the tensor that it is a view of lives on beside it
