"""Wrappers that average gradients, this library's and torch's: a parameter belongs to one of them.

Two of them around the same parameters average twice, or broadcast one rank's shard over the others'. Nothing of that
fails by itself. So each wrapper here asks first what it is about to wrap, and wrappers of torch's, which copy the
parameters of one rank or device to the others, are met when they register the module that they are to wrap.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
from collections.abc import Callable, Collection, Sequence
from typing import TypeVar, cast

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..errors import ConfigurationError
from ..types import AnyCallable, SavedState, StateDict, Tree

_OF_TORCH = {
    DistributedDataParallel: "torch.nn.parallel.DistributedDataParallel",
    DataParallel: "torch.nn.DataParallel",
}
_ours: dict[type[nn.Module], Callable[[nn.Parameter], bool] | None] = {}


def note_wrapper(wrapper: type[nn.Module], owns: Callable[[nn.Parameter], bool] | None = None) -> None:
    """Makes modules of this class, one of this library's, known to average their gradients.

    Args:
        owns: tells a parameter that only such a module can list.
    """
    if not _ours:
        register_module_module_registration_hook(_on_registration)
    _ours[wrapper] = owns
    _wrapper_among.cache_clear()


class AccelerateAsks:
    """Says whether accelerate, as it is set up now, can leave a module as it is; true or false when it asks.

    It reads ``module._is_accelerate_prepared``: see :class:`PreparedForAccelerate`.
    """

    def __bool__(self) -> bool:
        module = sys.modules.get("accelerate.state")
        state = getattr(module, "AcceleratorState", None)
        if state is None or not state._shared_state:
            return False
        known = state()
        return known.mixed_precision == "no" and str(known.distributed_type.value).startswith("MULTI_")


class PreparedForAccelerate:
    """Mixed into wrappers: accelerate (and transformers' Trainer, which uses it) leaves them as they are.

    It wraps modules in DistributedDataParallel, unless they say that this was done. With mixed precision of its own it
    has to do more, which it does in ``prepare_model(model, evaluation_mode=True)``; elsewhere it is refused below.
    """

    @property
    def _is_accelerate_prepared(self) -> bool:
        return bool(AccelerateAsks())

    @_is_accelerate_prepared.setter
    def _is_accelerate_prepared(self, value: bool) -> None:
        """Takes what accelerate notes when it has prepared a module."""


def check_modules(given: Sequence[object], who: str) -> None:
    """Raises ConfigurationError if one of these is no module."""
    if False in map(isinstance, given, itertools.repeat(nn.Module)):
        others = [type(m).__name__ for m in given if not isinstance(m, nn.Module)]
        raise ConfigurationError(
            f"{who} takes a module, and got a {others[0]}: pass the model, not its parameters()"
        )


def check_wrappable(
    module: nn.Module,
    who: str,
    may_hold: type[nn.Module] | None = None,
    without: Collection[nn.Module] = (),
    may_list: Callable[[nn.Parameter], bool] | None = None,
) -> None:
    """Refuses a module of which another wrapper averages the gradients, or whose parameters are more than tensors.

    Args:
        who: name of the wrapper, for the message.
        may_hold: wrappers of this class inside are fine.
        without: parts that the wrapper leaves alone.
        may_list: tells parameters that are more than tensors, and that the wrapper knows.
    """
    waiting, seen = [("", module)], {module}
    while waiting:
        path, m = waiting.pop()
        kind: Tree = type(m)
        wrapper = _wrapper_among(kind)
        if m in without or (wrapper is not None and may_hold is not None and isinstance(m, may_hold)):
            continue  # looked at when it was made
        if wrapper is not None:
            raise ConfigurationError(
                f"{who} can't wrap this module: {_place(path)} is a {wrapper}, which averages gradients itself. "
                f"Give {who} the module without it"
            )
        for name, child in reversed(m._modules.items()):
            if child is not None and child not in seen:
                seen.add(child)
                waiting.append((f"{path}.{name}" if path else name, child))
        for name, p in m._parameters.items():
            if p is None or type(p) is nn.Parameter or (may_list is not None and may_list(p)):
                continue
            if is_traceable_wrapper_subclass(p):
                full = f"{path}.{name}" if path else name
                raise ConfigurationError(
                    f"{who} can't wrap this module: its parameter {full!r} is a {type(p).__name__}, which is more than "
                    f"one plain tensor. Keep modules with such parameters (distributed, quantized) out of what {who} "
                    "wraps"
                )


def name_of_torchs(module: nn.Module) -> str:
    """Names a wrapper of torch's; "" for all other modules."""
    return next((name for kind, name in _of_torch().items() if isinstance(module, kind)), "")


@functools.lru_cache(maxsize=256)
def _wrapper_among(kind: type) -> str | None:
    """Names the wrapper, this library's or torch's, that a class is or derives from; None for all other classes."""
    known = {**dict.fromkeys(_ours, kind.__name__), **_of_torch()}
    return next((name for wrapper, name in known.items() if issubclass(kind, wrapper)), None)


def _of_torch() -> dict[type, str]:
    found = dict(_OF_TORCH)
    loaded = sys.modules.get("torch.distributed.fsdp")  # whoever uses it has imported it
    for name in ("FullyShardedDataParallel", "FSDPModule"):
        if hasattr(loaded, name):
            found[getattr(loaded, name)] = f"torch.distributed.fsdp.{name}"
    return found


def _place(path: str) -> str:
    return f"its part {path!r}" if path else "it"


def _on_registration(parent: nn.Module, name: str, module: nn.Module | None) -> None:
    """Looks before torch's constructors send anything: they begin with ``self.module = module``."""
    if module is None or not isinstance(parent, DistributedDataParallel | DataParallel):
        return
    ignored: set[str] = getattr(parent, "parameters_to_ignore", set())  # set_params_and_buffers_to_ignore
    for path, m in module.named_modules():
        if any(isinstance(m, kind) for kind in _ours):
            # as DistributedDataParallel asks: every module for its own, those inside of a unit too
            names = {
                n
                for below, inner in m.named_modules(prefix=path)
                for n, _ in inner.named_parameters(below, False)
            }
            if not names <= ignored:
                _refuse(parent, f"{_place(path)} is a {type(m).__name__}, which averages gradients itself")
    for path, p in module.named_parameters():
        if path not in ignored and any(owns(p) for owns in _ours.values() if owns is not None):
            _refuse(parent, f"its parameter {path!r} is this rank's shard, and rank 0's would replace it")


def _refuse(wrapper: nn.Module, why: str) -> None:
    kind = type(wrapper).__name__
    raise ConfigurationError(
        f"{kind} can't wrap this module: {why}. Leave {kind} out. accelerate and transformers' Trainer add it where "
        "they have mixed precision: give that to FSDP's PrecisionPolicy, or prepare the model by "
        "accelerator.prepare_model(model, evaluation_mode=True); give Lightning Fabric a strategy whose setup_module "
        "returns the module"
    )


# ------------------------------------------------------------ forward, with the signature of what is wrapped
# Trainers read it: transformers' drops the columns of a data set that a model's forward has no parameter for.
F = TypeVar("F", bound=AnyCallable)


def signed_as_wrapped(forward: F) -> F:
    """Decorates a wrapper's ``forward(self, *args, **kwargs)``; the wrapped module is its attribute ``module``."""
    return cast(F, _Forward(forward))


class _Forward:
    """A method; functions can't have another signature for each object."""

    def __init__(self, function: AnyCallable) -> None:
        self._function = self.__wrapped__ = function
        self.__doc__ = function.__doc__

    def __get__(self, wrapper: object, owner: type | None = None) -> AnyCallable:
        return self._function if wrapper is None else _Bound(self._function, wrapper)


class _Bound(functools.partial[Tree]):
    """The method of one wrapper. Calling it adds no call of Python's."""

    __name__ = "forward"

    __self__ = property(lambda self: self.args[0])
    __signature__ = property(lambda self: inspect.signature(self.args[0].module.forward))


def versions_of(state_dict: SavedState) -> StateDict | None:
    """Returns what torch noted, by path; None in dicts that were copied without the attribute."""
    try:
        return state_dict._metadata  # type: ignore[attr-defined]
    except AttributeError:
        return None
