"""Optimizers over shards that are listed as DTensors: what they update in a step is this rank's memory.

[Note: local steps] An optimizer that updates every element by itself gives the same results over a DTensor and over its
local rows, and costs a fraction over these: of each operation, DTensor looks for the placements of what comes out. So
from the beginning of such an optimizer's step to its end its groups list ordinary parameters, with the memory, the
gradients and the state of the DTensors. Between steps groups and state are as ever. What comes to be in a step is made
a DTensor at its end.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from torch import nn
from torch.optim import Optimizer

from ..errors import ConfigurationError
from ..optimizer_state.kinds import is_elementwise
from ..optimizers.elementwise import is_known_elementwise
from ..optimizers.stepping import take_part
from ..torch_seams.dtensors import is_dtensor, like_dtensor
from ..types import StateDict, Tree
from .registered_shard import listing_of

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

# Of torch: the one asks for losses of all ranks, the other DTensor can't compute.
_NAMED = ("LBFGS", "Adafactor")


class _Lent(NamedTuple):
    """A parameter in a step.

    Attributes:
        listed: the DTensor.
        local: what the step updates.
        state: of the DTensor before the step, by key.
    """

    listed: DTensor
    local: nn.Parameter
    state: StateDict


class _LocalSteps:
    """Takes part in steps; see the note."""

    def __init__(self) -> None:
        self._lists: weakref.WeakKeyDictionary[Optimizer, list[list[Tree]]] = weakref.WeakKeyDictionary()
        self._lent: weakref.WeakKeyDictionary[Optimizer, list[_Lent]] = weakref.WeakKeyDictionary()
        self._locals: weakref.WeakKeyDictionary[Optimizer, dict[int, nn.Parameter]] = (
            weakref.WeakKeyDictionary()
        )

    def before(self, optimizer: Optimizer) -> None:
        groups = optimizer.param_groups
        one_of_each = {type(p): p for g in groups for p in g["params"]}
        if not any(map(is_dtensor, one_of_each.values())):
            return
        ours = {listing_of(p) is not None for g in groups for p in g["params"] if is_dtensor(p)}
        if True not in ours:
            return
        name = type(optimizer).__name__
        if name in _NAMED:
            raise ConfigurationError(
                f"{name} looks at more than one element at a time, and at the loss, of which a rank knows its part: "
                f"over shards its steps would not be those of one process. Use shardkit.WholeParameters(model, "
                f"torch.optim.{name}, ...)"
            )
        if False in ours or not is_known_elementwise(type(optimizer)):
            return  # gradients of others' DTensors may be sums that are not made yet
        self._lists[optimizer] = [g["params"] for g in groups]
        lent = self._lent[optimizer] = []
        made = self._locals.setdefault(optimizer, {})
        state: Tree = optimizer.state
        for g in groups:
            g["params"] = [self._lend(p, state, made, lent) if is_dtensor(p) else p for p in g["params"]]

    @staticmethod
    def _lend(p: Tree, state: Tree, made: dict[int, nn.Parameter], lent: list[_Lent]) -> nn.Parameter:
        memory, gradient = p._local_tensor, p.grad
        local = made.get(id(p))
        if local is None or local.data_ptr() != memory.data_ptr() or local.shape != memory.shape:
            local = made[id(p)] = nn.Parameter(memory.detach(), requires_grad=p.requires_grad)
        local.grad = None if gradient is None else gradient._local_tensor
        own, kind = state.pop(p, {}), type(p)
        if own:
            state[local] = {k: v._local_tensor if type(v) is kind else v for k, v in own.items()}
        lent.append(_Lent(p, local, own))
        return local

    def after(self, optimizer: Optimizer) -> None:
        lists = self._lists.pop(optimizer, None)
        if lists is None:
            return
        for group, params in zip(optimizer.param_groups, lists, strict=True):
            group["params"] = params
        state: Tree = optimizer.state
        for listed, local, before in self._lent.pop(optimizer):
            local.grad = None
            now = state.pop(local, None)
            if now is not None:
                state[listed] = _returned(listed, local, before, now)


def _returned(listed: DTensor, local: nn.Parameter, before: StateDict, now: StateDict) -> StateDict:
    found: StateDict = {}
    kind = type(listed)
    for key, value in now.items():
        old = before.get(key)
        if type(old) is kind and old._local_tensor is value:
            found[key] = old
        elif is_elementwise(key, value, local.shape):
            found[key] = like_dtensor(value, listed)
        else:
            found[key] = value
    return found


_local_steps = _LocalSteps()


def step_locally(params: Sequence[nn.Parameter]) -> None:
    """From now on optimizers that list these DTensors update local memory."""
    if any(map(is_dtensor, params)):
        take_part(_local_steps, last=True)
