"""What every placement answers: where an optimizer's parameters are updated, and how all ranks get the result."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import final

import torch
from torch import nn
from torch.optim import Optimizer

from ...backend import Group, ReduceOp
from ...reduction.norms import Portion
from ...tracing.tracer import training_begins
from ...types import Kwargs, ParamGroup, StateDict, Tree
from .flat_segment import FlatSegment

Closure = Callable[[], Tree]
State = StateDict


class Placement(ABC):
    """Which tensors the optimizer of this rank updates; chosen once, when the OSS is built.

    Args:
        group: the ranks.
        owner: the rank that owns each parameter; it grows with the optimizer.
        wire_dtype: dtype in which updated fp32 parameters travel; None for their own.

    Attributes:
        runs_whole: every rank updates all parameters.
        segments: the flat segments that stand in for parameters, if any.
    """

    runs_whole = False

    def __init__(
        self, group: Group, owner: Mapping[nn.Parameter, int], wire_dtype: torch.dtype | None
    ) -> None:
        self.group = group
        self.segments: list[FlatSegment] = []
        self._owner = owner
        self._wire_dtype = wire_dtype
        training_begins(group)

    # ------------------------------------------------------------ values
    @abstractmethod
    def lay_out(self, groups: Sequence[ParamGroup]) -> None:
        """Takes what is trainable now into buffers; again whenever that has changed, or there are more groups."""

    @abstractmethod
    def updated_here(self, index: int, params: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """What the optimizer of this rank updates of a param group."""

    @abstractmethod
    def step(self, optimizer: Optimizer, closure: Closure | None, kwargs: Kwargs) -> Tree:
        """Steps this rank's optimizer and lets all ranks have the result (collective); what that step returns."""

    def publish(self) -> None:
        """Lets all ranks have what this rank's optimizer has changed outside of a step (collective)."""
        return

    # ------------------------------------------------------------ gradients
    @abstractmethod
    def gradients(self, optimizer: Optimizer) -> list[torch.Tensor]:
        """The gradients that the step of this rank will read."""

    @abstractmethod
    def clear_gradients(self) -> None:
        """Clears gradients that parameters themselves don't show."""

    @abstractmethod
    def to_clip(
        self, optimizer: Optimizer, params: Iterable[nn.Parameter], norm_type: float
    ) -> tuple[Portion, list[torch.Tensor]]:
        """The gradients whose norm counts, and those that are scaled by it.

        Raises:
            ConfigurationError: a norm of that order can't be taken here.
        """

    # ------------------------------------------------------------ state
    @abstractmethod
    def keeps_state_of(self, param: nn.Parameter) -> bool:
        """Whether this rank's optimizer needs the state of a parameter."""

    @abstractmethod
    def state_of_owned(self, optimizer: Optimizer) -> dict[nn.Parameter, State]:
        """State of each parameter that this rank answers for: each is answered for by one rank."""

    def state_of_all(self, optimizer: Optimizer, is_kept: bool) -> dict[nn.Parameter, State] | None:
        """The same of all parameters, where it ``is_kept``, without Python objects that ranks send each other
        (collective); None if there is no such way."""
        return None

    @abstractmethod
    def inner_state(self, optimizer: Optimizer, loaded: Mapping[nn.Parameter, State]) -> dict[int, State]:
        """The reverse: state by the index that it has in this rank's optimizer."""


class OfParameters(Placement):
    """The optimizer of this rank updates parameters themselves, which show all gradients and have all state."""

    def gradients(self, optimizer: Optimizer) -> list[torch.Tensor]:
        return gradients_of(optimizer)

    def clear_gradients(self) -> None:
        """Parameters show all of them."""

    def state_of_owned(self, optimizer: Optimizer) -> dict[nn.Parameter, State]:
        state: Tree = optimizer.state
        return {
            p: s
            for p, s in state.items()
            if not isinstance(p, str) and s and self._owner.get(p, self.group.rank) == self.group.rank
        }  # AdaScale has a name

    def inner_state(self, optimizer: Optimizer, loaded: Mapping[nn.Parameter, State]) -> dict[int, State]:
        params = [p for g in optimizer.param_groups for p in g["params"]]
        return {i: _laid_out_like(p, loaded[p]) for i, p in enumerate(params) if loaded.get(p)}


@final
class OnEveryRank(OfParameters):
    """Every rank's optimizer updates all parameters; owners only answer for the state that is saved.

    LBFGS couples all parameters. Where ranks have to run one compiled graph (``even_shards_only``), an optimizer works
    on flat segments, so there everything that is not known to be element-wise runs whole as well. Results are those of
    one process.
    """

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


def gradients_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """The gradients of what an optimizer updates."""
    return [p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None]


def by_dtype(params: Iterable[nn.Parameter]) -> dict[torch.dtype, list[nn.Parameter]]:
    """Parameters in order, grouped by dtype."""
    groups: dict[torch.dtype, list[nn.Parameter]] = {}
    for p in params:
        groups.setdefault(p.dtype, []).append(p)
    return groups


def _laid_out_like(param: nn.Parameter, state: State) -> State:
    """State with the parameter's strides: fused optimizers walk memory, whatever order a checkpoint had."""
    fitted = dict(state)
    for key, value in state.items():
        if (
            isinstance(value, torch.Tensor)
            and value.shape == param.shape
            and value.stride() != param.stride()
        ):
            fitted[key] = torch.empty_like(param, dtype=value.dtype, requires_grad=False).copy_(value)
    return fitted


def published_between(publish: Callable[[], None], closure: Closure) -> Closure:
    """The closure, which sees what all ranks have updated since it was last evaluated in the same step."""
    is_first = True

    def evaluated() -> Tree:
        nonlocal is_first
        if not is_first:
            publish()
        is_first = False
        return closure()

    return evaluated
