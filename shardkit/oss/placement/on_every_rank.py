"""All parameters on every rank: optimizers that can't be split by owner run whole, with the same gradients.

LBFGS couples all parameters. Where ranks have to run one compiled graph (``even_shards_only``), an optimizer works on
flat segments, so there everything that is not known to be element-wise runs whole as well. State is then not
sharded; results are those of one process.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, final

import torch
from torch import nn
from torch.optim import Optimizer

from ...backend import ReduceOp
from ...reduction.norms import Portion
from .base import (
    Closure,
    Placement,
    State,
    gradients_of,
    state_of_owned_parameters,
    state_of_parameters,
)


@final
class OnEveryRank(Placement):
    """Every rank's optimizer updates all parameters; owners only answer for the state that is saved."""

    runs_whole = True

    def lay_out(self, groups: Sequence[dict[str, Any]]) -> None:
        """Parameters stay as they are."""

    def updated_here(self, index: int, params: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        return list(params)

    def step(self, optimizer: Optimizer, closure: Closure | None, kwargs: dict[str, Any]) -> Any:
        """Steps with the mean of all ranks' losses, so that all ranks take the same decisions."""
        if closure is None:
            return optimizer.step(**kwargs)

        def mean_loss() -> Any:
            loss = closure()
            if not isinstance(loss, torch.Tensor):
                return loss
            mean = loss.detach().clone()
            self.group.channel("parameters").all_reduce(mean, op=ReduceOp.AVG, label="loss of the closure")
            return mean

        return optimizer.step(mean_loss, **kwargs)

    def gradients(self, optimizer: Optimizer) -> list[torch.Tensor]:
        return gradients_of(optimizer)

    def clear_gradients(self) -> None:
        """Parameters show all of them."""

    def to_clip(
        self, optimizer: Optimizer, params: Iterable[nn.Parameter], norm_type: float
    ) -> tuple[Portion, list[torch.Tensor]]:
        return Portion(gradients_of(optimizer), ()), [p.grad for p in params if p.grad is not None]

    def keeps_state_of(self, param: nn.Parameter) -> bool:
        return True

    def state_of_owned(self, optimizer: Optimizer) -> dict[nn.Parameter, State]:
        return state_of_owned_parameters(optimizer, self._owner, self.group.rank)

    def inner_state(self, optimizer: Optimizer, loaded: Mapping[nn.Parameter, State]) -> dict[int, State]:
        return state_of_parameters(optimizer, loaded)
