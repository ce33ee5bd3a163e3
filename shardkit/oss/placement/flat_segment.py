"""Flat segments: how an optimizer works on whole owned parameters where all ranks run one compiled graph.

Legend: W world size, S numel of one rank's segment.

[Note: flat segments] Where execution is lazy and compiled (``even_shards_only``), every rank has to record the
same operations on the same shapes, though ranks own different parameters. There the optimizer of a
rank works on one flat tensor [S] per group and dtype that holds its segment, padded to the same size
everywhere; element-wise optimizers can't tell the difference. Which segment is "mine" enters the graph as
data (an index), never as a shape.

[Note: gradients of segments] The reduced gradient lives in ``own.grad``; parameters keep none after backward. It is
replaced by the next reduction once a step has read it or ``zero_grad`` of the optimizer or the wrapper was called,
else added to. The module's own ``zero_grad`` is noticed too: the smallest parameter carries a stand-in as its
``grad`` in between, which such a call removes or writes to. Parameters that got no gradient (frozen, unused)
share a segment with others that did: a step puts their elements, and those of their state, back.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ...backend import Group, ReduceOp
from ...layout import SegmentLayout, segment_layout
from ...reduction.clearing import StandingGradient
from ...reduction.unused import UsedMask
from .segment_gradients import stand_in


class FlatSegment:
    """One param group's parameters of one dtype, whose owned segment is a flat tensor of equal size on all ranks.

    Attributes:
        own: the tensor that this rank's optimizer updates, [S].
        group: the ranks.
        param_group: index of the group that the parameters are in.
    """

    def __init__(
        self, params: Sequence[nn.Parameter], owners: Sequence[int], group: Group, param_group: int = 0
    ) -> None:
        self.params = list(params)
        self.param_group = param_group
        self.group = group
        self.layout: SegmentLayout = segment_layout(
            [p.numel() for p in params], owners, group.world_size, even=True
        )
        self._owned_by = [self.layout.items_of(rank) for rank in range(group.world_size)]
        self._padding = [
            size - sum(self.layout.slots[i].numel for i in items)
            for size, items in zip(self.layout.sizes, self._owned_by, strict=True)
        ]
        # what lies in a buffer one after the other, and where each parameter is in that list
        in_order = [i for items in self._owned_by for i in (*items, -1)]  # -1: padding
        gaps = iter(self._padding)
        self._numels = [next(gaps) if i < 0 else self.layout.slots[i].numel for i in in_order]
        self._places = [in_order.index(i) for i in range(len(self.params))]
        self._flag_room = max(len(items) for items in self._owned_by)  # F, most parameters that a rank owns
        self._sent_flags: tuple[list[bool], list[torch.Tensor]] | None = None  # and by owner on the device
        with torch.no_grad():
            own = self.take_own([p.detach() for p in self.params])
        self.own = nn.Parameter(own, requires_grad=True)
        self._is_used_up = True  # see [Note: gradients of segments]
        self._flags: torch.Tensor | None = None  # [F]; None while every parameter has a gradient
        self.marked = min(self.params, key=lambda p: p.numel())
        self._standing = StandingGradient()

    # ------------------------------------------------------------ gradients
    @torch.no_grad()
    def reduce_gradients(self, channel: Group, wire_dtype: torch.dtype | None) -> None:
        """Averages the parameters' gradients over ranks into ``own.grad``, added to what waits there already."""
        self.notice_clearing()
        gradients = [p.grad for p in self.params]
        packed = self.pack(gradients, flags=[g is not None for g in gradients])
        if wire_dtype is not None:
            packed = packed.to(wire_dtype)
        size = self.own.numel()
        mine = packed.new_empty(size + self._flag_room)
        channel.reduce_scatter_into(mine, packed, op=ReduceOp.AVG, label="gradients")
        mine = mine.to(self.own.dtype)
        all_used = all(g is not None for g in gradients)
        self._keep(mine[:size], None if all_used else mine[size:], add=not self._is_used_up)

    @torch.no_grad()
    def take_gradient(self) -> None:
        """Picks this rank's segment of gradients that are the same on every rank, where parameters have any."""
        mark = self._standing.gradient
        gradients = [None if p.grad is mark else p.grad for p in self.params]
        there = [g is not None for g in gradients]
        if not any(there):
            if mark is not None and self.marked.grad is None:
                self.clear_gradient()
            return
        flags = None
        if not all(there):
            mine = [float(there[i]) for i in self.layout.items_of(self.group.rank)]
            room = [0.0] * (self._flag_room - len(mine))
            flags = torch.tensor([*mine, *room]).to(device=self.own.device, dtype=self.own.dtype)
        self._keep(self.take_own(gradients), flags, add=False)

    def _keep(self, gradient: torch.Tensor, flags: torch.Tensor | None, add: bool) -> None:
        if add and self.own.grad is not None:
            gradient = gradient + self.own.grad
            flags = None if flags is None or self._flags is None else flags + self._flags
        self.own.grad = gradient
        self._flags = flags
        self._is_used_up = False
        for p in self.params:
            p.grad = None
        self._standing.stand(self.marked, stand_in(self.marked, self))

    def notice_clearing(self) -> None:
        """Before new gradients: whether the module's zero_grad was called since the last reduction."""
        mark = self._standing.gradient
        if mark is None:
            return
        if self._standing.was_touched(self.marked):
            self.clear_gradient()
        if self.marked.grad is mark:
            self.marked.grad = None
        self._standing.forget()

    def clear_gradient(self) -> None:
        """As ``zero_grad``."""
        self.own.grad = None
        self._flags = None
        self._is_used_up = True

    def mark_used_up(self) -> None:
        """A step read the gradient: the next reduction replaces it."""
        self._is_used_up = True

    def used(self) -> UsedMask | None:
        """Elements of ``own`` whose parameters got a gradient on any rank, [S]; None if all did."""
        if self._flags is None:
            return None
        owned = self.layout.items_of(self.group.rank)
        which = [k for k, i in enumerate(owned) for _ in range(self.layout.slots[i].numel)]
        index = torch.tensor([*which, *[0] * (self.own.numel() - len(which))], dtype=torch.int64)
        return UsedMask(self._flags.index_select(0, index.to(self.own.device)) != 0)

    # ------------------------------------------------------------ layout
    def pack(self, tensors: Sequence[torch.Tensor | None], flags: list[bool] | None = None) -> torch.Tensor:
        """Per-parameter tensors (None: zeros) laid out by owner with padding, [W * S] or, with flags, [W * (S + F)]."""
        pieces: list[torch.Tensor] = []
        flags_by_owner = None if flags is None else self._flags_on_device(flags)
        for rank, (items, padding) in enumerate(zip(self._owned_by, self._padding, strict=True)):
            for i in items:
                tensor = tensors[i]
                if tensor is None:
                    tensor = self.params[i].new_zeros(self.layout.slots[i].numel)
                elif tensor.is_sparse:
                    tensor = tensor.to_dense()
                pieces.append(tensor if tensor.dim() == 1 else tensor.reshape(-1))
            if padding:
                pieces.append(self.params[0].new_zeros(padding))
            if flags_by_owner is not None:
                pieces.append(flags_by_owner[rank])
        return torch.cat(pieces)

    def _flags_on_device(self, flags: list[bool]) -> list[torch.Tensor]:
        """By owner, [W][F]. They are data, and stay there until others are asked for."""
        if self._sent_flags is None or self._sent_flags[0] != flags:
            rows = [[float(flags[i]) for i in items] for items in self._owned_by]
            rows = [[*row, *[0.0] * (self._flag_room - len(row))] for row in rows]
            like = self.params[0]
            self._sent_flags = flags, [torch.tensor(row, dtype=like.dtype).to(like.device) for row in rows]
        return self._sent_flags[1]

    def take_own(self, tensors: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """This rank's segment [S] of per-parameter tensors that every rank holds."""
        # the rank is data, so that the graph is the same on all ranks
        index = torch.tensor([self.group.rank]).to(self.params[0].device)
        rows = self.pack(tensors).view(self.group.world_size, -1)
        return rows.index_select(0, index).view(-1)

    def split(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """A buffer laid out by owner [W * S] as per-parameter tensors, in parameter order."""
        # copies: of views, the runtime would keep the whole buffer too, and each use would cost more
        parts = torch.ops.aten.split_with_sizes_copy(flat, self._numels)
        found = [parts[place] for place in self._places]
        return [
            t if p.dim() == 1 else torch.ops.aten.view_copy(t, p.shape)
            for t, p in zip(found, self.params, strict=True)
        ]

    def split_own(self, segment: torch.Tensor) -> dict[nn.Parameter, torch.Tensor]:
        """This rank's segment [S] as one tensor per owned parameter."""
        start = self.layout.start(self.group.rank)
        return {
            self.params[i]: segment[
                self.layout.slots[i].offset - start : self.layout.slots[i].offset
                - start
                + self.layout.slots[i].numel
            ].view(self.params[i].shape)
            for i in self.layout.items_of(self.group.rank)
        }

    def join_own(self, pieces: dict[nn.Parameter, torch.Tensor]) -> torch.Tensor:
        """The reverse of :meth:`split_own`: this rank's segment [S], padded with zeros."""
        flat = [pieces[self.params[i]].reshape(-1) for i in self.layout.items_of(self.group.rank)]
        filled = sum(f.numel() for f in flat)
        like = flat[0] if flat else self.own.detach()
        padding = like.new_zeros(self.layout.sizes[self.group.rank] - filled)
        return torch.cat([*flat, padding]).to(self.own.device)

    @torch.no_grad()
    def publish(self, wire_dtype: torch.dtype | None) -> None:
        """All-gathers every owner's segment and hands the parameters their new values."""
        own = self.own.detach()
        if wire_dtype is not None and own.dtype == torch.float32:
            own = own.to(wire_dtype)
        if self.group.world_size == 1:
            full = own
        else:
            full = own.new_empty(self.layout.numel)
            self.group.all_gather_into(full, own, label="updated parameters")
        for p, value in zip(self.params, self.split(full), strict=True):
            p.data = value if value.dtype == p.dtype else value.to(p.dtype)
        if own is not self.own and own.dtype != self.own.dtype:
            self.own.data = own.to(self.own.dtype)
