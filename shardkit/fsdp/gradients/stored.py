"""Gradients where tensors own memory.

Legend: W world size, S shard numel, F flags in one rank's part.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from typing import final

import torch

from ...backend import Group
from ...layout import Piece, gaps_between
from ..flat_param import FlatParam
from .pack import GradientPack, Reduction


@final
class StoredPack(GradientPack):
    """Packs into a buffer [W * (S + F)] whose memory exists while it is in use, through views laid out beforehand."""

    def __init__(
        self, flat: FlatParam, group: Group, reduce_dtype: torch.dtype | None, divisors: tuple[float, float]
    ) -> None:
        super().__init__(flat, group, reduce_dtype, divisors)
        self._flags_of: list[list[int]] = [
            [] for _ in range(group.world_size)
        ]  # members with a part on each rank
        for p in self._pieces:
            self._flags_of[p.rank].append(p.item)
        self._size = flat.layout.shard_numel
        self._part = self._size + max(map(len, self._flags_of))
        self._packed = torch.empty(self._part * group.world_size, dtype=self._dtype, device=self._device)
        self._lay_out()
        self._gaps = self._find_gaps()
        group.backend.release_storage(self._packed)

    def _lay_out(self) -> None:
        """Views of the packed form for each gradient."""
        self._whole: list[int] = []  # members that lie in one part
        self._targets: list[torch.Tensor] = []
        self._cut: list[tuple[Piece, torch.Tensor]] = []
        for p in self._pieces:
            at = p.rank * self._part + p.offset
            view = self._packed[at : at + p.numel]
            shape = self._flat.members[p.item].shape
            if p.numel == shape.numel():
                self._whole.append(p.item)
                self._targets.append(view.view(shape))
            else:
                self._cut.append((p, view))
        self._flag_views = [
            self._packed[r * self._part + self._size : r * self._part + self._size + len(items)]
            for r, items in enumerate(self._flags_of)
        ]
        self._targets += [view for _, view in self._cut] + self._flag_views
        self._ones = [torch.ones_like(v) for v in self._flag_views]

    def _find_gaps(self) -> list[torch.Tensor]:
        """What no gradient fills: padding, frozen members, flags that a rank does not need."""
        part = self._part
        filled = [(p.rank * part + p.offset, p.numel) for p in self._pieces]
        filled += [(r * part + self._size, len(items)) for r, items in enumerate(self._flags_of)]
        gaps = gaps_between(filled, part * self._group.world_size)
        return [self._packed[start : start + numel] for start, numel in gaps]

    # ------------------------------------------------------------ sending
    def _reduce(self, gradients: list[torch.Tensor | None]) -> Reduction:
        had = [g is not None for g in gradients]
        self._group.backend.take_storage(self._packed)
        had_all = False not in compress(had, self.trainable)
        if had_all:
            self._pack_all(self._sources(gradients))
        else:
            self._pack_some(self._sources(gradients), had)
        gradients.clear()
        return self._scatter(self._packed, had, had_all)

    def _sources(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """What goes to each target but flags."""
        sources = list(map(gradients.__getitem__, self._whole))
        flat_views: dict[int, torch.Tensor] = {}
        for piece, _ in self._cut:
            g = gradients[piece.item]
            if g is None:
                sources.append(None)
                continue
            if piece.item not in flat_views:
                flat_views[piece.item] = (g.to_dense() if g.layout is torch.sparse_coo else g).reshape(-1)
            sources.append(flat_views[piece.item][piece.start : piece.start + piece.numel])
        return sources

    def _pack_all(self, sources: list[torch.Tensor | None]) -> None:
        """One operation for everything."""
        for k in range(len(self._whole)):
            if sources[k].layout is torch.sparse_coo:  # type: ignore[union-attr]
                sources[k] = sources[k].to_dense()  # type: ignore[union-attr]
        sources += self._ones
        torch._foreach_copy_(self._targets, sources)  # type: ignore[arg-type]
        if self._gaps:
            torch._foreach_zero_(self._gaps)

    def _pack_some(self, sources: list[torch.Tensor | None], had: list[bool]) -> None:
        self._packed.zero_()
        for target, source in zip(self._targets, sources, strict=False):  # flags are the last targets
            if source is not None:
                target.copy_(source.to_dense() if source.layout is torch.sparse_coo else source)
        for view, items in zip(self._flag_views, self._flags_of, strict=True):
            for k, item in enumerate(items):
                if had[item]:
                    view[k] = 1

    # ------------------------------------------------------------ receiving
    def _arrived(self) -> None:
        self._group.backend.release_storage(self._packed)

    def _anywhere(self, had: list[bool], result: torch.Tensor) -> list[bool]:
        had = list(had)
        flags = (result[self._size : self._size + len(self._here)] != 0).tolist()
        for item, flag in zip(self._here, flags, strict=True):
            had[item] = had[item] or flag
        return had
