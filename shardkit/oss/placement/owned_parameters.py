"""Each parameter on its owner: eager optimizers update whole parameters in place and publish them.

Legend: W world size, N numel of a flat buffer, S numel of one rank's segment.

[Note: flat parameters] Where tensors have storage, all trainable parameters of one dtype become views
into one flat buffer, grouped by owner. The optimizer of a rank works on its own parameters in place; the
all-gather that follows writes straight into everybody's parameters, and nothing is copied.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import final

import torch
from torch import nn
from torch.optim import Optimizer

from ...backend import Group, Work
from ...layout import alignment, segment_layout
from ...reduction.norms import Portion
from ...torch_seams.compiling import callees_compiled, not_compiled
from ...torch_seams.strided_views import strided_view
from ...tracing.ranges import PublishRanges
from ...types import Kwargs, ParamGroup, Tree
from .base import Closure, OfParameters, by_dtype, gradients_of, published_between


class FlatParameters:
    """Trainable parameters of one dtype as views into one buffer [N] grouped by owner."""

    def __init__(self, params: Sequence[nn.Parameter], owners: Sequence[int], group: Group) -> None:
        self.params = list(params)
        self._group = group
        step = alignment(params[0].element_size())
        self._layout = segment_layout([p.numel() for p in params], owners, group.world_size, step=step)
        self._pointers: list[int] = []
        self._build()

    @torch.no_grad()
    def _build(self) -> None:
        first = self.params[0]
        self._buffer = torch.empty(self._layout.numel, dtype=first.dtype, device=first.device)
        for p, piece in zip(self.params, self._layout.pieces, strict=True):
            view = strided_view(self._buffer, p, self._layout.start(piece.rank) + piece.offset)
            view.copy_(p)
            p.data = view
        self._own = self.segment(self._group.rank)
        self._pointers = [p.data_ptr() for p in self.params]

    def segment(self, rank: int) -> torch.Tensor:
        """A rank's part of the buffer, [S]."""
        start = self._layout.start(rank)
        return self._buffer[start : start + self._layout.sizes[rank]]

    def publish(self, wire_dtype: torch.dtype | None) -> Work | None:
        """Starts the all-gather of every owner's segment into everybody's parameters."""
        if [p.data_ptr() for p in self.params] != self._pointers:
            # somebody moved the module or put new tensors in: take their values, then share them
            self._build()
        if self._group.world_size == 1 and wire_dtype is None:
            return None
        if wire_dtype is None or self._buffer.dtype != torch.float32:
            return self._group.all_gather_into(
                self._buffer, self._own, self._layout.sizes, async_op=True, label="updated parameters"
            )
        wire = torch.empty_like(self._buffer, dtype=wire_dtype)
        start = self._layout.start(self._group.rank)
        own = wire[start : start + self._own.numel()]
        own.copy_(self._own)
        work = self._group.all_gather_into(
            wire, own, self._layout.sizes, async_op=True, label=f"updated parameters in {wire_dtype}"
        )
        return _CopyAfter(work, wire, self._buffer)


class _CopyAfter(Work):
    """Work whose result is copied (and cast) into another tensor."""

    def __init__(self, work: Work, source: torch.Tensor, target: torch.Tensor) -> None:
        self._work, self._source, self._target = work, source, target

    def is_done(self) -> bool:
        return self._work.is_done()

    def wait(self) -> None:
        self._work.wait()
        with torch.no_grad():
            self._target.copy_(self._source)


@final
class OwnedParameters(OfParameters):
    """A rank's optimizer updates the parameters that the rank owns.

    Attributes:
        buffers: what the trainable parameters are views of, one for each dtype.
        ranges: in traces.
    """

    buffers: Sequence[FlatParameters] = ()
    ranges: PublishRanges

    def lay_out(self, groups: Sequence[ParamGroup]) -> None:
        trainable = by_dtype(p for g in groups for p in g["params"] if p.requires_grad)
        channel = self.group.channel("parameters")
        self.buffers = [
            FlatParameters(ps, [self._owner[p] for p in ps], channel) for ps in trainable.values()
        ]
        nbytes = sum(p.numel() * p.element_size() for ps in trainable.values() for p in ps)
        self.ranges = PublishRanges("updated parameters", self.group.ranks, gather=nbytes)

    def updated_here(self, index: int, params: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        return [p for p in params if self._owner[p] == self.group.rank]

    @callees_compiled
    def step(self, optimizer: Optimizer, closure: Closure | None, kwargs: Kwargs) -> Tree:
        with self.ranges.step():
            if closure is None:
                loss = optimizer.step(**kwargs)
            else:
                loss = optimizer.step(published_between(self.publish, closure), **kwargs)
        self.publish()
        return loss

    @not_compiled
    def publish(self) -> None:
        """See :meth:`Placement.publish`."""
        with self.ranges.gather():
            works = [buffer.publish(self._wire_dtype) for buffer in self.buffers]
        with self.ranges.gather_wait():
            for work in works:
                if work is not None:
                    work.wait()

    def to_clip(
        self, optimizer: Optimizer, params: Iterable[nn.Parameter], norm_type: float
    ) -> tuple[Portion, list[torch.Tensor]]:
        everywhere = [p.grad for p in params if p.grad is not None]
        return Portion(gradients_of(optimizer), (self.group,)), everywhere

    def keeps_state_of(self, param: nn.Parameter) -> bool:
        return self._owner[param] == self.group.rank
