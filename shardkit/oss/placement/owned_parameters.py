"""Each parameter on its owner: eager optimizers update whole parameters in place and publish them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import final

import torch
from torch import nn
from torch.optim import Optimizer

from ...reduction.norms import Portion
from ...tracing.ranges import PublishRanges
from ...types import Kwargs, ParamGroup, Tree
from .base import Closure, OfParameters, by_dtype, gradients_of, published_between
from .flat_parameters import FlatParameters


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

    def step(self, optimizer: Optimizer, closure: Closure | None, kwargs: Kwargs) -> Tree:
        with self.ranges.step():
            if closure is None:
                loss = optimizer.step(**kwargs)
            else:
                loss = optimizer.step(published_between(self.publish, closure), **kwargs)
        self.publish()
        return loss

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
