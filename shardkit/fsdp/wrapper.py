"""The door that wraps: FSDP, and what all wrappers around a module share."""

from __future__ import annotations

import abc
import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch
from torch import nn

from ..backend import Backend, callees_compiled
from ..errors import ConfigurationError, LifecycleError, noting_errors
from ..flattening.wrapper import FlatParameter, FlattenParamsWrapper, translates_loaded
from ..layout import Align, AlignedLayout, RowsLayout
from ..optimizer_state.forms import check_request
from ..optimizers.shards import listing_of
from ..policy import OffloadPolicy, PrecisionPolicy, ReducePolicy, ReshardPolicy
from ..torch_seams.hooks import callers
from ..torch_seams.tensors import shards_and_replicas_of
from ..torch_seams.wrappers import (
    PreparedForAccelerate,
    check_modules,
    check_wrappable,
    note_wrapper,
    signed_as_wrapped,
)
from ..types import IncompatibleKeys, Memo, ProcessGroup, SavedState, StateDict, Tree
from .construct import begin_move, check_copied, check_pickled, end_move, shard, wake
from .engine import EXPORT, refusal
from .forward import run_gathered, through
from .originals import check_asker, put_into_wrapper
from .sharded_api import ShardedAPI
from .state import WRAPPED, Ignored, Options, ShardingState, clean, exit_summon, summoned
from .state_dict import add_wrapping, begin_loading, full_state_dict, loading
from .submodule_api import collecting

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def _register_parameter(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
    """Registers as on any module; the wrapped module's own can't be replaced."""
    try:
        nn.Module.register_parameter(self, name, param)
    except KeyError:
        raise put_into_wrapper(name) from None


class UnitModule(FlattenParamsWrapper):
    """Lists a unit's shards as ``flat_param_0``, ... or, unflattened, under the parameters' own names.

    To readers it is a :class:`FlattenParamsWrapper`, whose names and attributes it has; but the parameters are original
    parameters of sharded flat parameters, and the FSDP module around it moves them.
    """

    def __init__(self, module: nn.Module) -> None:
        nn.Module.__init__(self)
        self._fpw_module = module
        self.is_flattened = True
        self.flat_param_names = []
        self.num_params_managed = 0
        self._unflattened_for_load = None
        self._auto_unflatten_state_dict = False

    @property
    def flat_params(self) -> list[FlatParameter]:  # type: ignore[override]
        """The listed flat parameters (this rank's shards)."""
        found = [self._parameters.get(name) for name in self.flat_param_names]
        return [p for p in found if isinstance(p, FlatParameter)]

    def _fqn_modifiers(self) -> dict[str, str]:
        """Tells torch.distributed.checkpoint what to leave out of names."""
        return {"": "_fpw_module"}

    def __setattr__(self, name: str, value: Tree) -> None:
        """Sets as on any module, but not where forward would not look: buffers of the wrapped one become its."""
        if name.startswith("_flat_param") and all(value is not p for p in self.flat_params):
            raise put_into_wrapper(name)
        inner: Tree = self._modules.get("_fpw_module", self)
        nn.Module.__setattr__(inner if name in inner._buffers else self, name, value)

    # What the standalone wrapper does about views and state dicts, the FSDP module does here.
    def forward(self, *inputs: object, **kwinputs: object) -> Tree:
        """Runs the wrapped module's forward."""
        return self._fpw_module(*inputs, **kwinputs)

    def unflatten_params(self, flat_params: object = None) -> NoReturn:
        """Refuses: there is no such thing here.

        Raises:
            LifecycleError: always.
        """
        raise LifecycleError(
            "parameters of an FSDP module are sharded; use its summon_full_params() to see them unflattened"
        )

    register_parameter = _register_parameter
    _apply = nn.Module._apply
    state_dict = nn.Module.state_dict
    load_state_dict = nn.Module.load_state_dict
    _load_from_state_dict = nn.Module._load_from_state_dict
    __setstate__ = nn.Module.__setstate__

    def __deepcopy__(self, memo: Memo) -> UnitModule:
        made = memo[id(self)] = type(self).__new__(type(self))
        made.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return made

    def __getstate__(self) -> StateDict:
        """Leaves out what answers for the wrapper around it, which may be copied later: that one gives it anew."""
        return {name: value for name, value in self.__dict__.items() if name != "state_dict"}


class _NotManaged:
    """Answers torch's own FSDP, 1 and 2, which sets this on all that it is about to manage, and torch's compiler.

    It is false itself, too: the compiler of torch 2.15 looks at the class and doesn't ask the instance.
    """

    def __get__(self, wrapper: object, owner: object) -> bool:
        return False

    def __set__(self, wrapper: object, value: bool) -> None:
        raise ConfigurationError(
            "torch's FSDP can't wrap a module that shardkit's FSDP has sharded: it would shard the shards. Use one of "
            "them; torch's FullyShardedDataParallel can leave this module alone (ignored_modules=[module])"
        )

    def __bool__(self) -> bool:
        return False


Self = TypeVar("Self", bound="Door")
_together: ContextVar[list[Door] | None] = ContextVar("shardkit.fsdp.wrapper.together", default=None)


@contextmanager
def built_together() -> Iterator[None]:
    """Only puts wrappers around modules inside; at the end all are sharded, after one exchange of all ranks.

    Of classes that have it as their own attribute: what they do next, they do in :meth:`Door._sharded`.
    """
    doors: list[Door] = []
    before = _together.set(doors)
    try:
        yield
    finally:
        _together.reset(before)
    shard([door._state for door in doors])
    for door in doors:
        door._sharded()


class Door(PreparedForAccelerate, nn.Module, ShardedAPI, abc.ABC):
    """Does what all wrappers share: forward through the unit, state dicts of the wrapped module, moves and copies.

    Attributes, methods and items are those of the wrapped module; parameters and forward are not.

    Abstract: a wrapper has its own arguments, and calls :meth:`_shard` with what they mean.
    """

    def _shard(self, module: nn.Module, options: Options, ignored: Ignored | None = None) -> None:
        check_modules([module], type(self).__name__)
        nn.Module.__init__(self)
        state = ShardingState(self, module, options, ignored)
        check_wrappable(module, type(self).__name__, may_hold=Door, without=state.ignored.modules)
        self._fsdp_wrapped_module = state.unit_module = UnitModule(module)
        self._state = state
        waiting = _together.get()
        if waiting is not None and "built_together" in vars(type(self)):
            waiting.append(self)
        else:
            shard([state])
            self._sharded()
        self.register_load_state_dict_pre_hook(_before_load)
        self.register_load_state_dict_post_hook(_after_load)

    def _sharded(self) -> None:
        """Does what is due as soon as its parameters are sharded."""

    # ------------------------------------------------------------ the wrapped module
    @property
    @abc.abstractmethod
    def module(self) -> nn.Module:
        """Returns the wrapped module, or the wrapper's inner part around it."""

    def __getattr__(self, name: str) -> Tree:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in (WRAPPED, "_state") or name.startswith("__"):
                raise
            unit: Any = self._modules[WRAPPED]
            return through(self._state, getattr(unit._fpw_module, name))

    # ------------------------------------------------------------ what needs parameters in their places
    register_parameter = _register_parameter

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Lists as of any module; torch.export asks for it before it records anything."""
        code = getattr(getattr(sys.modules.get(EXPORT), "_get_original_state_dict", None), "__code__", None)
        if code is not None and any(frame.f_code is code for frame in list(callers())):
            raise refusal(self._state.unit, "torch.export (torch.onnx.export too)")
        return super().named_modules(memo, prefix, remove_duplicate)

    def __prepare_scriptable__(self) -> NoReturn:
        """Answers what torch.jit.script asks for first."""
        raise refusal(self._state.unit, "torch.jit.script")

    # ------------------------------------------------------------ containers
    def __getitem__(self, key: object) -> Tree:
        return self.module[key]  # type: ignore[index]

    def __setitem__(self, key: object, value: object) -> None:
        container: Any = self.module
        container[key] = value

    def __len__(self) -> int:
        return len(self.module)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Tree]:
        return iter(self.module)  # type: ignore[call-overload, no-any-return]

    def __contains__(self, key: object) -> bool:
        return key in self.module  # type: ignore[operator]

    def __bool__(self) -> bool:
        return bool(self.module)  # not every module has a length

    # ------------------------------------------------------------ torch's own checkpoints and FSDP
    def _fqn_modifiers(self) -> dict[str, str]:
        """Tells torch.distributed.checkpoint what to leave out of names; it asks before it does anything."""
        unit: Any = self._state.unit_module
        check_request(self._state.all_flats)
        inner: dict[str, str] = getattr(self.module, "_fqn_modifiers", dict)()
        return {**inner, **dict.fromkeys(unit.flat_param_names, "_unit_module"), "": WRAPPED}

    _is_fsdp_managed_module, _unit_module = _NotManaged(), property(lambda self: self._state.unit_module)

    # ------------------------------------------------------------ forward
    @signed_as_wrapped
    @callees_compiled
    def forward(self, *args: object, **kwargs: object) -> Tree:
        """Runs the module with its parameters gathered."""
        state = self._state
        if state.is_asleep:
            wake(state)
        unit: Tree = state.unit_module
        called = state.module
        if unit._forward_hooks or unit._forward_pre_hooks or unit._backward_hooks or unit._backward_pre_hooks:
            called = unit  # which fairscale's wrappers have as their ``module``: a program hooks it
        return run_gathered(state, called, args, kwargs)

    def apply(self: Self, fn: Callable[[nn.Module], None]) -> Self:
        """Applies as ``nn.Module.apply`` to the inner module, with full parameters whose changes are kept (collective).

        ``fn`` gets the modules of the unwrapped model, once each, and no wrappers: these have the attributes of what
        they wrap, so that a function that looks for a ``weight`` would initialize it once more.
        """
        with summoned(self._state, recurse=False, writeback=True):
            self._state.module.apply(fn)
        return self

    # ------------------------------------------------------------ state dicts
    @noting_errors
    def state_dict(self, *args: Any, **kwargs: Any) -> Tree:
        """Returns full parameters under the wrapped module's own names, in full precision, on every rank (collective).

        They are copies: writing to one changes nothing here.
        """
        check_asker(self, keeps_names=False)
        return self._door_state_dict(*args, **kwargs)

    def _door_state_dict(self, *args: Any, **kwargs: Any) -> StateDict:
        return full_state_dict(self._state, super().state_dict, *args, **kwargs)

    @noting_errors
    def load_state_dict(
        self, state_dict: SavedState, strict: bool = True, assign: bool = False
    ) -> IncompatibleKeys:
        """Loads a full state dict (collective); each rank keeps its shard. Arguments and result are ``nn.Module``'s."""
        with loading(self):
            return self._load_door(state_dict, strict, assign)

    def _load_door(
        self, state_dict: SavedState, strict: bool = True, assign: bool = False
    ) -> IncompatibleKeys:
        return super().load_state_dict(state_dict, strict, assign)

    # ------------------------------------------------------------ being moved and copied
    def _apply(self: Self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        begin_move(self._state)
        with collecting():
            super()._apply(fn, recurse)
        end_move(self._state)
        return self

    def __deepcopy__(self: Self, memo: Memo) -> Self:
        check_copied(self._state, memo)
        made = memo[id(self)] = type(self).__new__(type(self))
        made.__setstate__(copy.deepcopy(self.__dict__, memo))
        return made

    def __getstate__(self) -> StateDict:
        check_pickled(self._state)
        return self.__dict__.copy()

    def __setstate__(self, state: StateDict) -> None:
        super().__setstate__(state)
        wake(self._state)


def _before_load(door: Door, state_dict: StateDict, prefix: str, *others: object) -> None:
    begin_loading(door._state, state_dict)
    if translates_loaded():
        add_wrapping(door, state_dict, prefix)


def _after_load(door: Door, incompatible: IncompatibleKeys) -> None:
    for names in incompatible:  # without what wrapping has added to them
        names[:] = [clean(n) for n in names]
    exit_summon(door._state, "state dict")


note_wrapper(Door, owns=lambda param: listing_of(param) is not None)


class FSDP(Door):
    """Shards a module's parameters evenly over ranks; each forward and backward gathers them unit by unit.

    ::

        block = FSDP(block)                 # units: wrap what should be gathered together
        model = FSDP(model)                 # the root holds the rest
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)   # after wrapping

    ``parameters()`` lists this rank's shards: a flat parameter for each unit (and dtype), or with ``flatten=False`` one
    for each parameter. After backward their ``grad`` is this rank's shard of the mean over ranks. Any optimizer that
    works element by element gives the results of plain training. Attributes of the wrapped module are reached through
    the wrapper; its parameters have values only inside forward, backward and :meth:`summon_full_params`. Elsewhere they
    tell their shapes and gradients, and raise :class:`LifecycleError` for all that needs values.
    :func:`~shardkit.fully_shard` does the same to a module in place.

    Source: ZeRO (arXiv 1910.02054); naming and layout are those of fairscale 0.4.13.

    Args:
        module: any module on one device. Parts of it that are FSDP already keep what they hold; weights that they share
            with the rest stay one weight.
        group: ranks among which parameters are sharded; None for all.
        replicas: ranks that hold the same shard as this one (hybrid sharding); gradients are averaged over them too.
        mesh: in place of both: one of one dimension, or of two with replicas along the first.
        precision: dtypes of compute, inputs and buffers.
        reshard: when gathered parameters are given back.
        offload: what lives in host memory.
        reduce: dtype and division of gradients on the wire.
        align: how the flat parameter is cut. "parameters": each parameter lies on one rank as a whole, and shards are
            as large as the fullest; "rows": no cut goes through a row of a parameter; a number: parameters begin at
            multiples of so many elements (8 of bfloat16 are the 16 bytes at which devices compute fastest, which
            counts after a parameter of odd size). The padding that it costs is logged. By default parameters lie end to
            end, as in fairscale: its local state dicts have that layout, and those of other alignments load into the
            same alignment.
        flatten: one flat parameter for the module, not one for each parameter.
        sync_module_states: start from rank 0's values. Otherwise ranks must hold the same ones.
        device: where to compute; by default where the parameters are.
        backend: name or instance of the backend; by default that of the device.

    Raises:
        ConfigurationError: parameters on several devices; options that exclude each other.
        RankMismatchError: parameters of two ranks differ in names, shapes, dtypes (or, without
            ``sync_module_states``, in values).
    """

    built_together = staticmethod(built_together)

    @noting_errors
    def __init__(
        self,
        module: nn.Module,
        *,
        group: ProcessGroup = None,
        replicas: ProcessGroup = None,
        mesh: DeviceMesh | None = None,
        precision: PrecisionPolicy | None = None,
        reshard: ReshardPolicy | None = None,
        offload: OffloadPolicy | None = None,
        reduce: ReducePolicy | None = None,
        align: Align = None,
        flatten: bool = True,
        sync_module_states: bool = True,
        device: torch.device | str | None = None,
        backend: str | Backend | None = None,
    ) -> None:
        if mesh is not None:
            group, replicas = shards_and_replicas_of(mesh, group, replicas)
        self._shard(
            module,
            Options.given(
                group=group,
                replicas=replicas,
                precision=precision,
                reshard=reshard,
                offload=offload,
                reduce=reduce,
                flatten=flatten,
                sync_module_states=sync_module_states,
                device=device,
                backend=backend,
                layout=AlignedLayout(align) if flatten else RowsLayout(align),
            ),
        )

    @property
    def module(self) -> nn.Module:
        """Returns the wrapped module."""
        return self._fsdp_wrapped_module._fpw_module
