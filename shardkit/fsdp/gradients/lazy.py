"""Gradients where a compiler decides when they exist, so that all ranks have to build one program.

Legend: W world size, S shard numel, F flags in one rank's part.
"""

from __future__ import annotations

from itertools import compress
from typing import final

import torch

from ...backend import Group
from ..flat_param import FlatParam
from ..skipping import protect_unused
from .pack import GradientPack, Reduction


@final
class LazyPack(GradientPack):
    """Packs by concatenation, without writing into parts of a tensor: [W * S], or [W * (S + F)] with flags.

    Flags are there if a gradient is missing. Another rank that misses none sends none; the two run different programs
    then, and are out of step. Which members had one is not known here, but data: see ``unused.py``.
    """

    def __init__(
        self, flat: FlatParam, group: Group, reduce_dtype: torch.dtype | None, divisors: tuple[float, float]
    ) -> None:
        super().__init__(flat, group, reduce_dtype, divisors)
        counts = [0] * group.world_size
        for p in self._pieces:
            counts[p.rank] += 1
        self._flags = max(counts)
        self._slots: torch.Tensor | None = None

    def _reduce(self, gradients: list[torch.Tensor | None]) -> Reduction | None:
        had = [g is not None for g in gradients]
        if True not in had:  # on no rank, or they are out of step
            return None
        had_all = False not in compress(had, self.trainable)
        joined = self._joined(gradients)
        gradients.clear()
        return self._scatter(joined if had_all else self._with_flags(joined, had), had, had_all)

    def _joined(self, gradients: list[torch.Tensor | None]) -> torch.Tensor:
        layout = self._flat.layout
        rows = self._rows(gradients)
        if layout.padded_numel != layout.numel:
            padding = layout.padded_numel - layout.numel
            rows.append(torch.zeros(padding, dtype=self._dtype, device=self._device))
        return torch.cat(rows)

    def _with_flags(self, joined: torch.Tensor, had: list[bool]) -> torch.Tensor:
        layout = self._flat.layout
        flags = torch.zeros(layout.world_size, self._flags, dtype=self._dtype)
        ends = [0] * layout.world_size
        for p in self._pieces:
            flags[p.rank, ends[p.rank]] = float(had[p.item])
            ends[p.rank] += 1
        parts = joined.view(layout.world_size, layout.shard_numel)
        return torch.cat([parts, flags.to(parts.device)], 1).view(-1)

    def _arrived(self) -> None:
        """The compiler frees what was sent."""

    def _note(self, had: list[bool], had_all: bool, result: torch.Tensor) -> bool:
        """As :meth:`GradientPack._note`, but for elements, and as data."""
        flat, used = self._flat, None
        if not had_all or False in self.trainable:
            flags = result.new_ones(self._flags) if had_all else result[flat.layout.shard_numel :]
            used = torch.cat([flags, flags.new_zeros(1)]).index_select(0, self._slots_of_elements()) != 0
        flat.unused.note_elements(used, flat.param.grad is None)
        if flat.unused.used is not None:
            protect_unused(flat)
        return True

    def clear_unused(self) -> None:
        """As :meth:`GradientPack.clear_unused`, for elements."""
        size = self._flat.layout.shard_numel
        self._flat.unused.clear(torch.zeros(size, dtype=torch.bool).to(self._device))

    def _slots_of_elements(self) -> torch.Tensor:
        """For each element of this rank's shard the index of its member's flag, [S]; the last one if it has none."""
        if self._slots is None:
            slots = torch.full((self._flat.layout.shard_numel,), self._flags)
            here = [p for p in self._pieces if p.rank == self._group.rank]
            for k, p in enumerate(here):
                slots[p.offset : p.offset + p.numel] = k
            self._slots = slots.to(self._device)
        return self._slots

    def _own(self, result: torch.Tensor) -> torch.Tensor:
        return super()._own(result).clone()  # else the tensor that it is a view of lives on beside it
