"""Methods of a wrapped module other than forward, called through the FSDP module (``model.generate(x)``).

They may compute with the module's parameters, or only tell something, and nobody knows in advance. So the unit is
gathered when the first of its modules is called, which is when every rank that computes gets there, and given back
when the method returns. A method counts as one forward: gradients of what it returns flow as from forward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from ..torch_seams.compiling import not_compiled
from ..torch_seams.hooks import NO_BACKWARD, current_backward, tensors_in, tensors_of, watch_outputs
from .calls import lends_memory, without_lent_memory
from .construct import modules_outside_units
from .engine import Watcher
from .tracing import check_forward
from .unit import UnitCall

if TYPE_CHECKING:
    from .wrapper import FSDP


def through(wrapper: FSDP, found: Any) -> Any:
    """An attribute of the wrapped module as the wrapper hands it out: a method gathers what it needs."""
    if isinstance(found, MethodType) and isinstance(found.__self__, nn.Module):
        return _call_of(wrapper, found)
    return found


def _call_of(wrapper: FSDP, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        engine = wrapper._engine
        if wrapper._summoned is not None or (
            engine is not None and engine.forwards and wrapper._unit.is_held
        ):
            return method(*args, **kwargs)  # there are values
        return MethodCall(wrapper).run(method, args, kwargs)

    return call


class MethodCall:
    """One call of a method; see above."""

    def __init__(self, wrapper: FSDP) -> None:
        self._wrapper = wrapper
        self._modules = {m for _, m in modules_outside_units(wrapper.module, _unit_type())}
        self._is_entered = self._is_outermost = self._records = False
        self._inputs: Any = ()
        self._watcher: Watcher = wrapper._unit

    @not_compiled
    def run(self, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls the method."""
        self._inputs = (args, kwargs)
        with ExitStack() as stack:
            stack.callback(register_module_forward_pre_hook(self._before).remove)
            stack.enter_context(_FullStateDict(self._wrapper))
            try:
                outputs = method(*args, **kwargs)
            except BaseException:
                if self._is_entered and self._wrapper._engine is not None:
                    self._wrapper._engine.fail_forward(self._is_outermost)
                raise
        if self._is_entered:
            return self._leave(outputs)
        return outputs

    def _before(self, module: nn.Module, inputs: Any) -> None:
        if self._is_entered or module not in self._modules:
            return
        wrapper = self._wrapper
        check_forward(wrapper._unit)
        engine = wrapper._engine or wrapper._become_root()
        self._is_entered, self._records = True, torch.is_grad_enabled()
        self._is_outermost = (
            bool(wrapper._is_root) and engine.forwards == 0 and current_backward() == NO_BACKWARD
        )
        if self._is_outermost:
            engine.begin_forward()
        engine.before_forward(wrapper._unit, self._inputs)
        if wrapper._unit.has_frozen and self._records:
            self._watcher = UnitCall.watching(wrapper._unit, tensors_in(self._inputs))

    def _leave(self, outputs: Any) -> Any:
        """What the caller gets."""
        wrapper = self._wrapper
        engine, unit = wrapper._engine, wrapper._unit
        if engine is None:
            return outputs
        tensors = tensors_of(outputs)
        if lends_memory(unit, tensors):
            outputs = without_lent_memory(unit, outputs)
            tensors = tensors_of(outputs)
        engine.after_forward(unit)
        if self._records:
            watcher = engine.watching(self._watcher) if self._is_outermost else self._watcher
            engine.note_outputs(unit, watch_outputs(tensors, watcher.enter_backward))
        if self._is_outermost:
            engine.end_forward()
        return outputs


class _FullStateDict:
    """Inside, ``state_dict()`` of the wrapped module is that of the wrapper: ``save_pretrained`` calls it."""

    def __init__(self, wrapper: FSDP) -> None:
        self._wrapper = wrapper
        self._attributes: dict[str, Any] = wrapper.module.__dict__

    def __enter__(self) -> None:
        self._attributes["state_dict"] = self._state_dict

    def __exit__(self, *error: Any) -> None:
        self._attributes.pop("state_dict", None)

    def _state_dict(self, *args: Any, **kwargs: Any) -> Any:
        del self._attributes["state_dict"]  # the wrapper will ask the module itself
        try:
            return self._wrapper.state_dict(*args, **kwargs)
        finally:
            self._attributes["state_dict"] = self._state_dict


def _unit_type() -> type[nn.Module]:
    from .wrapper import FSDP

    return FSDP
