"""Methods of a wrapped module other than forward, called through the FSDP module (``model.generate(x)``).

They may compute with the module's parameters, or only tell something, and nobody knows in advance. So the unit is
gathered when the first of its modules is called, which is when every rank that computes gets there, and given back
when the method returns. A method counts as one forward: gradients of what it returns flow as from forward.
"""

from __future__ import annotations

import functools
from contextlib import ExitStack
from types import MethodType
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from ..torch_seams.compiling import not_compiled
from ..types import AnyCallable, Args, Kwargs, StateDict, Tree
from .running import Entered, enter, fail, leave, watched
from .state import ShardingState


def through(state: ShardingState, found: Tree) -> Tree:
    """An attribute of the wrapped module as the wrapper hands it out: a method gathers what it needs."""
    if isinstance(found, MethodType) and isinstance(found.__self__, nn.Module):
        return _call_of(state, found)
    return found


def _call_of(state: ShardingState, method: AnyCallable) -> AnyCallable:
    @functools.wraps(method)
    def call(*args: object, **kwargs: object) -> Tree:
        engine = state.engine
        if state.summoned is not None or (engine is not None and engine.forwards and state.unit.is_held):
            return method(*args, **kwargs)  # there are values
        return MethodCall(state).run(method, args, kwargs)

    return call


class MethodCall:
    """One call of a method; see above."""

    def __init__(self, state: ShardingState) -> None:
        self._state = state
        self._modules = {m for _, m in state.own_modules() if m is not state.door}  # which gathers by itself
        self._entered: Entered | None = None
        self._args: Args = ()
        self._kwargs: Kwargs = {}

    @not_compiled
    def run(self, method: AnyCallable, args: Args, kwargs: Kwargs) -> Tree:
        """Calls the method."""
        self._args, self._kwargs = args, kwargs
        with ExitStack() as stack:
            stack.callback(register_module_forward_pre_hook(self._before).remove)
            stack.enter_context(_FullStateDict(self._state))
            try:
                outputs = method(*args, **kwargs)
            except BaseException as error:
                if self._entered is not None:
                    fail(self._state, self._entered, error)
                raise
            finally:
                if self._entered is not None:
                    self._state.is_computing = False
        return outputs if self._entered is None else leave(self._state, self._entered, outputs)

    def _before(self, module: nn.Module, inputs: object) -> None:
        if self._entered is None and module in self._modules and not self._state.is_computing:
            entered = enter(self._state, self._args, self._kwargs)
            self._state.is_computing = True
            self._entered = watched(entered, self._state, (self._args, self._kwargs))


class _FullStateDict:
    """Inside, ``state_dict()`` of the wrapped module is that of the wrapper: ``save_pretrained`` calls it."""

    def __init__(self, state: ShardingState) -> None:
        self._door = state.door
        self._attributes: StateDict = state.module.__dict__

    def __enter__(self) -> None:
        self._attributes["state_dict"] = self._state_dict

    def __exit__(self, *error: object) -> None:
        self._attributes.pop("state_dict", None)

    def _state_dict(self, *args: Any, **kwargs: Any) -> StateDict:
        del self._attributes["state_dict"]  # the wrapper will ask the module itself
        try:
            return self._door.state_dict(*args, **kwargs)
        finally:
            self._attributes["state_dict"] = self._state_dict
