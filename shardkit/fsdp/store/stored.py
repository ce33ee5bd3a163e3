"""Values where tensors own memory.

Legend: W world size, S shard numel.

[Note: packed shards] Where each original parameter is cut by itself (``PackedLayout``), one all-gather brings the parts
of all of them rank by rank, and one operation copies these to where original parameters are views. The memory that was
gathered into exists from the all-gather to the copy. Other layouts need no copy: they are gathered in their places.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch

from ...layout import PackedLayout
from ...reduction.compression import CompressedGather
from ..flat_values import Unpacking, own_part
from ..kept_views import KeptViews
from ..originals import FlatParamLike
from .base import Gather, Store
from .states import GATHERED, GATHERING, KEPT, RELEASED, State


@final
class Stored(Store):
    """One buffer whose memory is taken for gathering and given back; views of it come back to life with it.

    Such views are the original parameters, and what autograd saved of them.
    """

    def __init__(self, flat: FlatParamLike) -> None:
        super().__init__(flat)
        self._mesh = flat.post_forward_mesh
        self._kept: torch.Tensor | None = None  # this rank's part of what the mesh keeps
        blocks = flat.blocks
        self._compressed = None if blocks is None else CompressedGather(self._group, blocks)
        self._look_at(torch.empty(self._layout.padded_numel, dtype=self._dtype, device=self._device))

    def _look_at(self, full: torch.Tensor) -> None:
        self._full = full  # [W * S]
        self._own = own_part(full, self._group)  # [S]
        layout, is_packed = self._layout, self._group.world_size > 1
        self._unpacking = Unpacking(layout, full) if is_packed and isinstance(layout, PackedLayout) else None
        self.memory = full.untyped_storage()._cdata
        self._kept_views = KeptViews(self.memory, self._originals, self._layout)

    def fits(self) -> bool:
        """Views of the memory may be saved for backward, so it serves on where it can."""
        flat = self._flat
        return (
            self._group is flat.group
            and self._dtype == flat.compute_dtype
            and self._device == flat.compute_device
        )

    @property
    def gathered(self) -> torch.Tensor:
        return self._full

    def attach(self) -> None:
        self._shard = torch.empty(0)  # what is sent: the shard's memory, [S]
        self.summoned = None
        self._backend.take_storage(self._full)
        self._reveal()
        self.show(self._full)
        self.state = self._free(False)

    def start(self, after: Sequence[torch.Tensor] = ()) -> None:
        flat, full, kept = self._flat, self._full, self._kept
        self.state = GATHERING
        if kept is not None and self._mesh is not None:
            self._kept = None
            self._backend.take_storage(full)
            mesh = self._mesh.channel("parameters")
            work = mesh.all_gather_into(full, kept, async_op=True, label=flat.label)
            self.in_flight = Gather(work, full)
            return
        own = self._own
        if self._unpacking is not None:
            full = torch.empty_like(full)
            own = own_part(full, self._group)
        else:
            self._backend.take_storage(full)
        if self._compressed is not None:
            shard = flat.param.data.view(-1).to(self._device)
            work = self._compressed.start(self._gather, full, shard, flat.label)
        else:
            shard = self._shard
            if shard.data_ptr() != flat.param.data_ptr():  # else it is as it was: two operations less
                shard = self._shard = flat.param.data.view(-1)
            own.copy_(shard)  # casts, and comes from the host
            if self._group.world_size == 1:
                self.state = GATHERED
                self._arrive(full)
                return
            gather = self._channel.all_gather_into if flat.hears is None else self._gather  # a call less
            work = gather(full, own, async_op=True, label=flat.label)
        self.in_flight = Gather(work, full)

    def _arrive(self, values: torch.Tensor) -> None:
        if self._unpacking is not None and values is not self._full:
            self._backend.take_storage(self._full)
            with torch.no_grad():
                self._unpacking.unpack(values)
        self._reveal()
        if self._kept_views.found:
            self._kept_views.reveal()

    def lock(self) -> None:
        if self.state is GATHERED:
            self._kept_views.conceal(self._flat.modules)
        super().lock()

    def unlock(self) -> None:
        super().unlock()
        self._kept_views.reveal()

    def _free(self, keep: bool) -> State:
        if keep and self._mesh is not None:
            self._kept = own_part(self._full, self._mesh).clone()
        if not self._full.untyped_storage().resizable():  # numpy or the like has a view, and keeps the memory
            self._look_at(torch.empty_like(self._full))
            self.show(self._full)
        self._kept_views.conceal(self._flat.modules)
        self._conceal()
        self._backend.release_storage(self._full)
        return RELEASED if self._kept is None else KEPT

    def forget_kept(self) -> None:
        self._kept = None
        super().forget_kept()
