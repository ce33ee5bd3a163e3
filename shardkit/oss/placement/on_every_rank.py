"""All parameters on every rank: optimizers that can't be split by owner run whole, with the same gradients.

LBFGS couples all parameters. Where ranks have to run one compiled graph (``even_shards_only``), an optimizer works on
flat segments, so there everything that is not known to be element-wise runs whole as well. State is then not
sharded; results are those of one process.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import final

import torch
from torch import nn
from torch.optim import Optimizer

from ...backend import ReduceOp
from ...reduction.norms import Portion
from ...types import Kwargs, ParamGroup, Tree
from .base import Closure, OfParameters, State, gradients_of


@final
class OnEveryRank(OfParameters):
    """Every rank's optimizer updates all parameters; owners only answer for the state that is saved."""

    runs_whole = True

    def lay_out(self, groups: Sequence[ParamGroup]) -> None:
        """Parameters stay as they are."""

    def updated_here(self, index: int, params: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        return list(params)

    def step(self, optimizer: Optimizer, closure: Closure | None, kwargs: Kwargs) -> Tree:
        """Steps with the mean of all ranks' losses, so that all ranks take the same decisions."""
        if closure is None:
            return optimizer.step(**kwargs)

        def mean_loss() -> Tree:
            loss = closure()
            if not isinstance(loss, torch.Tensor):
                return loss
            mean = loss.detach().clone()
            self.group.channel("parameters").all_reduce(mean, op=ReduceOp.AVG, label="loss of the closure")
            return mean

        return optimizer.step(mean_loss, **kwargs)

    def to_clip(
        self, optimizer: Optimizer, params: Iterable[nn.Parameter], norm_type: float
    ) -> tuple[Portion, list[torch.Tensor]]:
        return Portion(gradients_of(optimizer), ()), [p.grad for p in params if p.grad is not None]

    def keeps_state_of(self, param: nn.Parameter) -> bool:
        return True

    def state_of_all(self, optimizer: Optimizer, is_kept: bool) -> dict[nn.Parameter, State]:
        """Each rank has it."""
        self.group.backend.mark_step(
            wait=True
        )  # where that is a collective, ranks that do not read take part
        state: Tree = optimizer.state
        return {p: s for p, s in state.items() if not isinstance(p, str) and s} if is_kept else {}
