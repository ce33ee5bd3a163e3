"""The class of a module that is sharded as FSDP2 shards it; see [Note: FSDP2's class] in ``torch_words.py``."""

from __future__ import annotations

import copy
import sys
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, cast

from torch import nn

from ..errors import ConfigurationError
from ..types import AnyCallable, Args, Kwargs, StateDict, Tree
from .forward import become_root
from .state import ShardingState, state_of
from .torch_words import METHODS, TorchsMethods, cast_outputs

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from .fully_shard import InPlace

_classes: dict[type, type[nn.Module]] = {}


def sharded_class(kind: type[nn.Module]) -> type[nn.Module]:
    """Returns the class with torch's FSDPModule in front of a module's own, as torch makes it, and these methods."""
    if kind in _classes:
        return _classes[kind]
    from torch.distributed.fsdp import FSDPModule

    theirs = [name for name, value in vars(FSDPModule).items() if callable(value) and name[:2] != "__"]
    own: dict[str, object] = {name: _method(name) for name in dict.fromkeys([*METHODS, *theirs])}
    own.update(reset_iter_state=_reset, _get_fsdp_state=_torchs_state, _apply=kind._apply)
    own.update(__reduce_ex__=_reduced, __module__=kind.__module__)
    _classes[kind] = made = type(f"FSDP{kind.__name__}", (FSDPModule, kind), own)
    return made


def own_class(module: nn.Module) -> type[nn.Module]:
    """Returns the class that a module was written with."""
    kind = type(module)
    return kind.__mro__[2] if vars(kind).get("__reduce_ex__") is _reduced else kind


def _method(name: str) -> AnyCallable:
    def call(self: nn.Module, *args: object, **kwargs: object) -> Tree:
        state = state_of(self)
        if state is None or name not in METHODS:
            raise ConfigurationError(
                f"{name} of this {own_class(self).__name__}: "
                + (
                    "it is a copy without its shards"
                    if state is None
                    else "of a torch that is newer than shardkit"
                )
            )
        return METHODS[name](TorchsMethods(state), *args, **kwargs)

    call.__name__ = call.__qualname__ = name
    return call


def _reduced(self: nn.Module, protocol: object) -> tuple[object, ...]:
    """Returns what copies and files are made of: the class is made anew of the module's own."""
    made = cast("tuple[object, ...]", object.__reduce_ex__(self, 2))
    return _made, (own_class(self),), *made[2:]


def _made(kind: type[nn.Module]) -> nn.Module:
    made = kind.__new__(kind)
    made.__class__ = sharded_class(kind)
    return made


# ------------------------------------------------------------ what torch's own functions ask for
def _torchs_state(self: nn.Module) -> AsTorchsState:
    state = state_of(self)
    hooks = [getattr(hook, "__self__", None) for hook in self._forward_pre_hooks.values()]
    found = [hook for hook in hooks if hasattr(hook, "enter_method")]
    if state is None or not found:
        raise ConfigurationError(f"this {own_class(self).__name__} is a copy without its shards")
    return AsTorchsState(state, cast("InPlace", found[0]))


def _reset(self: nn.Module) -> None:
    state = _torchs_state(self)
    state._hooks.end_method()
    TorchsMethods(state._state).reset_iter_state()


class AsTorchsState:
    """Stands for torch's state of a module, and its parameters' group, to those that need little of it.

    These are ``register_fsdp_forward_method``; pipelines, which reduce gradients after their last micro-batch; trainers
    that ask whether a module is sharded (torch's ``_get_module_fsdp_state``), in which dtype it computes, or what is
    kept (NeMo Automodel, verl, axolotl). What else is read or set is refused.
    """

    # set by verl, where torch's own had to be told what is found out here
    __slots__ = ("__weakref__", "_auto_reshard_after_forward", "_hooks", "_state", "_training_state")

    def __init__(self, state: ShardingState, hooks: InPlace) -> None:
        self._state, self._hooks = state, hooks

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

        return FSDPState

    @property
    def _mp_policy(self) -> MixedPrecisionPolicy:
        from torch.distributed.fsdp import MixedPrecisionPolicy

        options = self._state.options
        hooks: list[Any] = list(self._state.module._forward_hooks.values())
        cast_to = [hook.args[0] for hook in hooks if getattr(hook, "func", None) is cast_outputs]
        return MixedPrecisionPolicy(
            options.precision.compute, options.reduce.dtype, (*cast_to, None)[0], options.casts_inputs
        )

    @property
    def reshard_after_backward(self) -> bool:
        """Says whether parameters are given back."""
        return not self._state.unit.keep_after_backward

    def _pre_forward(self, module: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        frame: FrameType = sys._getframe(1)
        return self._hooks.enter_method(module, args, kwargs, frame)

    def _post_forward(self, module: nn.Module, args: Args, outputs: Tree) -> Tree:
        return self._hooks.leave_method(module, outputs)

    @property
    def _state_ctx(self) -> AsTorchsState:
        return self

    @property
    def all_states(self) -> list[AsTorchsState]:
        return [self]

    _fsdp_param_groups = all_states

    @property
    def _fsdp_param_group(self) -> AsTorchsState:  # until torch 2.10
        return self

    def _lazy_init(self) -> None:
        if self._state.engine is None:
            become_root(self._state)

    def post_backward(self) -> None:
        """Reduces gradients that backwards have kept (collective)."""
        if self._state.engine is not None:
            self._state.engine.reduce_now()

    def _root_post_backward_final_callback(self) -> None:
        """Nothing is left to do."""

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"{name} of torch's state of an FSDPModule: this module is sharded by shardkit, whose state is another one"
        )


def note_state_for_torch(module: nn.Module) -> None:
    """Lets torch's ``fully_shard.state(module)`` and ``_get_module_fsdp_state(module)`` find it."""
    from torch.distributed._composable.contract import STATE_KEY
    from torch.distributed._composable_state import _insert_module_state

    module.__dict__[STATE_KEY] = states = ComposableStates(module, module.__dict__.get(STATE_KEY, {}))
    states.of_module = _torchs_state(module)
    _insert_module_state(module, cast("Any", states.of_module))  # which holds it weakly


class ComposableStates(dict[object, object]):
    """Answers where torch's ``fully_shard.state(module)`` looks for it, of one module, and has others' states."""

    def __init__(self, module: nn.Module, others: dict[object, object]) -> None:
        super().__init__(others)
        self._module = module
        self.of_module: AsTorchsState | None = None  # of copies none

    def get(self, key: object, default: object = None) -> object:
        """Returns that of ``fully_shard``, or another's."""
        is_ours = getattr(key, "__name__", "") == "fully_shard"
        return _torchs_state(self._module) if is_ours else super().get(key, default)

    def __deepcopy__(self, memo: dict[int, Tree]) -> ComposableStates:
        return ComposableStates(memo.get(id(self._module), self._module), copy.deepcopy(dict(self), memo))

    def __reduce__(self) -> tuple[object, ...]:
        return ComposableStates, (self._module, dict(self))

    def __setstate__(self, state: StateDict) -> None:
        """It has none."""
