"""Each parameter on its owner: eager optimizers update whole parameters in place and publish them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, final

import torch
from torch import nn
from torch.optim import Optimizer

from ...reduction.norms import Portion
from ...torch_seams.phases import Phase
from .base import (
    Closure,
    Placement,
    State,
    by_dtype,
    gradients_of,
    published_between,
    state_of_owned_parameters,
    state_of_parameters,
)
from .flat_parameters import FlatParameters


@final
class OwnedParameters(Placement):
    """A rank's optimizer updates the parameters that the rank owns.

    Attributes:
        buffers: what the trainable parameters are views of, one for each dtype.
    """

    buffers: Sequence[FlatParameters] = ()

    def lay_out(self, groups: Sequence[dict[str, Any]]) -> None:
        trainable = by_dtype(p for g in groups for p in g["params"] if p.requires_grad)
        channel = self.group.channel("parameters")
        self.buffers = [
            FlatParameters(ps, [self._owner[p] for p in ps], channel) for ps in trainable.values()
        ]

    def updated_here(self, index: int, params: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        return [p for p in params if self._owner[p] == self.group.rank]

    def step(self, optimizer: Optimizer, closure: Closure | None, kwargs: dict[str, Any]) -> Any:
        with Phase("shardkit::oss step"):
            if closure is None:
                loss = optimizer.step(**kwargs)
            else:
                loss = optimizer.step(published_between(self._publish, closure), **kwargs)
        self._publish()
        return loss

    def _publish(self) -> None:
        with Phase("shardkit::oss all-gather"):
            for work in [buffer.publish(self._wire_dtype) for buffer in self.buffers]:
                if work is not None:
                    work.wait()

    def gradients(self, optimizer: Optimizer) -> list[torch.Tensor]:
        return gradients_of(optimizer)

    def clear_gradients(self) -> None:
        """Parameters show all of them."""

    def to_clip(
        self, optimizer: Optimizer, params: Iterable[nn.Parameter], norm_type: float
    ) -> tuple[Portion, list[torch.Tensor]]:
        everywhere = [p.grad for p in params if p.grad is not None]
        return Portion(gradients_of(optimizer), (self.group,)), everywhere

    def keeps_state_of(self, param: nn.Parameter) -> bool:
        return self._owner[param] == self.group.rank

    def state_of_owned(self, optimizer: Optimizer) -> dict[nn.Parameter, State]:
        return state_of_owned_parameters(optimizer, self._owner, self.group.rank)

    def inner_state(self, optimizer: Optimizer, loaded: Mapping[nn.Parameter, State]) -> dict[int, State]:
        return state_of_parameters(optimizer, loaded)
