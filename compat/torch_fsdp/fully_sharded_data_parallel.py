"""torch.distributed.fsdp.FullyShardedDataParallel, FSDP1, on shardkit's FSDP."""

from __future__ import annotations

import contextlib
import gc
import os
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from operator import attrgetter
from typing import NoReturn

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import _init_optim_state
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import OptimStateKeyType
from torch.distributed.fsdp._common_utils import TrainingState
from torch.distributed.fsdp.api import (
    BackwardPrefetch,
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    MixedPrecision,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from shardkit.backend import Backend, Group, backend_of_job
from shardkit.checks import check_same_everywhere, shape_fact
from shardkit.errors import ConfigurationError, LifecycleError, RedirectedError
from shardkit.flattening.wrapper import FLAT_PREFIX
from shardkit.fsdp import hybrid_groups
from shardkit.fsdp.construct import begin_move, end_move
from shardkit.fsdp.flat_param import FlatParam, put_together
from shardkit.fsdp.forward import cast_inputs
from shardkit.fsdp.originals import managing
from shardkit.fsdp.state import (
    WRAPPED,
    Ignored,
    Options,
    ShardingState,
    clean,
    dotted,
    modules_outside_units,
    plain_name,
    summoned,
)
from shardkit.fsdp.state_dict import check_own, follow_shards, gather_parts, local_state, parameters_of
from shardkit.fsdp.wrapper import Door, UnitModule
from shardkit.layout import AlignedLayout, EachAlone
from shardkit.nn.data_parallel import PassedGroup, StandIn, device_for, group_for
from shardkit.optimizer_state.forms import (
    Held,
    Source,
    from_rank_0,
    from_state,
    gather_by_name,
    shard_by_name,
)
from shardkit.optimizer_state.kinds import Slot
from shardkit.optimizers.shards import MADE
from shardkit.oss import OSS
from shardkit.policy import OffloadPolicy, PrecisionPolicy, ReducePolicy, ReshardPolicy
from shardkit.torch_seams.hooks import NO_BACKWARD, callers
from shardkit.torch_seams.tensors import cut_rows, is_cut, mesh_over, move_buffers, whole
from shardkit.torch_seams.wrappers import check_modules
from shardkit.training.whole_parameters import WholeParameters
from shardkit.types import AnyCallable, Args, Kwargs, ParamGroup, ProcessGroup, SavedState, StateDict, Tree
from shardkit.wrapping.context import WrapContext, wrap_tree
from shardkit.wrapping.policies import AdaptedPolicy, adapt_policy

from . import api

__all__ = [*api.__all__, "FullyShardedDataParallel", "OptimStateKeyType"]

_NOT_HANDED_ON = ("self", "__class__", "module", "auto_wrap_policy", "ignored_modules", "ignored_states")
_SHOWN = ("backward_prefetch", "forward_prefetch", "limit_all_gathers")
_KINDS: dict[str, Tree] = {
    "sharding_strategy": ShardingStrategy,
    "cpu_offload": CPUOffload,
    "backward_prefetch": BackwardPrefetch,
    "mixed_precision": MixedPrecision,
    "param_init_fn": Callable,
    "device_mesh": DeviceMesh,
}
OptimInput = list[ParamGroup] | Iterable[nn.Parameter]


class FullyShardedDataParallel(StandIn):
    """torch's FullyShardedDataParallel: see :class:`shardkit.FSDP` for what it does. Rank 0's initial values count.

    Args:
        module: model or layer.
        process_group: ranks among which parameters are sharded, None for all; for hybrid strategies (ranks to shard
            over, replicas), or None for the ranks of a machine as torchrun counts them.
        sharding_strategy: FULL_SHARD by default; all of torch's.
        cpu_offload: shards live on the CPU.
        auto_wrap_policy: wraps submodules first; functions and objects of ``torch.distributed.fsdp.wrap``.
        backward_prefetch: None: no unit is gathered while another one computes.
        mixed_precision: all fields but ``keep_low_precision_grads``: gradients have their parameters' dtype.
        ignored_modules: these are left alone, with all below them. An older name for ``ignored_states``.
        param_init_fn: called with each module if parameters are on the meta device; default: their
            ``reset_parameters()``.
        device_id: where what is on the CPU goes first.
        sync_module_states: buffers are rank 0's, too.
        forward_prefetch, limit_all_gathers: accepted; the next unit is gathered while one computes, no further one.
        use_orig_params: ``parameters()`` lists a shard for each parameter, under its name, and not one for each unit.
        ignored_states: modules or parameters that are not sharded, and whose gradients are not averaged.
        device_mesh: in place of ``process_group``; two-dimensional for hybrid strategies, replicas first.

    Raises:
        ConfigurationError: arguments that exclude each other, or of another kind.
        RankMismatchError: see :class:`shardkit.FSDP`.
    """

    _settings: StateDictSettings  # of state dicts
    # as they were passed, or torch's defaults
    sharding_strategy: ShardingStrategy
    mixed_precision: MixedPrecision
    cpu_offload: CPUOffload
    backward_prefetch: BackwardPrefetch | None
    forward_prefetch: bool
    limit_all_gathers: bool

    def __init__(
        self,
        module: nn.Module,
        process_group: ProcessGroup = None,
        sharding_strategy: ShardingStrategy | None = None,
        cpu_offload: CPUOffload | None = None,
        auto_wrap_policy: object = None,
        backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
        mixed_precision: MixedPrecision | None = None,
        ignored_modules: Iterable[nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], object] | None = None,
        device_id: int | torch.device | None = None,
        sync_module_states: bool = False,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        use_orig_params: bool = False,
        ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None = None,
        device_mesh: DeviceMesh | None = None,
    ) -> None:
        given = {name: value for name, value in locals().items() if name not in _NOT_HANDED_ON}
        for name, kind in _KINDS.items():
            if given[name] is not None and not isinstance(given[name], kind):
                raise ConfigurationError(
                    f"{name} is {given[name]!r}; pass a {kind.__name__}, as to torch's FSDP, or None"
                )
        if device_mesh is not None and process_group is not None:
            raise ConfigurationError("pass process_group or device_mesh, not both: a mesh has its groups")
        check_modules([module], type(self).__name__)
        ignored = ignored_of(module, ignored_modules, ignored_states)
        if auto_wrap_policy is not None:
            below = {**given, "ignored_states": [*ignored.modules, *ignored.parameters]}
            wrap_below(module, auto_wrap_policy, ignored, FullyShardedDataParallel, below)
        self._wrap(module, ignored, given)
        self.__dict__.update({name: given[name] for name in _SHOWN})
        self._settings = checked(StateDictType.FULL_STATE_DICT, None, None)
        self.register_forward_pre_hook(_follow)

    def _wrap(self, module: nn.Module, ignored: Ignored, given: Kwargs) -> None:
        """Gives the module start values where it is to be, and shards it."""
        strategy = given["sharding_strategy"] or ShardingStrategy.FULL_SHARD
        offload, mixed = given["cpu_offload"], given["mixed_precision"]
        group, replicas = groups_of(strategy, given["process_group"], given["device_mesh"])
        backend = backend_of_job()
        device = device_of(given["device_id"], backend)
        materialize_each(module, given["param_init_fn"], device or backend.device(), ignored)
        own = [m for _, m in modules_outside_units(module, without=ignored.modules)]
        params = [p for m in own for p in m.parameters(recurse=False) if p not in ignored.parameters]
        if device is not None:
            for p in params:
                if managing(p) is None and p.device.type == "cpu":
                    p.data = p.data.to(device)
            for m in own:
                move_buffers(m, device, "cpu")
        offloads = offload is not None and offload.offload_params
        compute = device_for(params, None, offloads)
        casts = mixed or MixedPrecision(cast_forward_inputs=True)
        if os.environ.get("FSDP_USE_FULL_PREC_IN_EVAL") == "1" and (casts.param_dtype or casts.buffer_dtype):
            raise ConfigurationError(
                "FSDP_USE_FULL_PREC_IN_EVAL=1: evaluation computes in param_dtype here, as training does. Unset it"
            )
        prefetches = given["backward_prefetch"] is not None or given["forward_prefetch"]
        options = Options(
            group=group,
            replicas=replicas,
            flatten=not given["use_orig_params"],
            layout=EachAlone(AlignedLayout(None)) if given["use_orig_params"] else AlignedLayout(None),
            device=compute,
            precision=PrecisionPolicy(compute=casts.param_dtype, buffers=casts.buffer_dtype),
            reduce=ReducePolicy(dtype=casts.reduce_dtype),
            casts_inputs=casts.cast_forward_inputs,
            casts_root_inputs=casts.cast_root_forward_inputs,
            reshard=ReshardPolicy(strategy not in _KEEPING, prefetch=int(prefetches)),
            offload=OffloadPolicy(parameters=offloads),
        )
        self._shard(module, options, ignored)
        if compute is not None:
            for m in module.modules():
                move_buffers(m, compute)
        if given["sync_module_states"]:
            ranks = [self._state.group] + ([] if self._state.replicas is None else [self._state.replicas])
            broadcast_buffers(self._state.own_modules(), ranks)
        self._passed_group = PassedGroup(given["device_mesh"] or given["process_group"])
        self.sharding_strategy = strategy
        self.mixed_precision = mixed or MixedPrecision()
        self.cpu_offload = offload or CPUOffload()

    # ------------------------------------------------------------ what existing code reads
    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[FullyShardedDataParallel]:
        """Returns the FSDP modules at and below a module; with ``root_only`` those that are in no other one."""
        found = [m for m in module.modules() if isinstance(m, FullyShardedDataParallel)]
        inner = {m for outer in found for m in outer.modules() if m is not outer} if root_only else set()
        return [m for m in found if m not in inner]

    module = property(attrgetter("_state.unit_module._fpw_module"))  # the wrapped one
    rank = property(lambda self: ranks_of(self._state).rank)
    world_size = property(lambda self: ranks_of(self._state).world_size)
    _use_orig_params = property(lambda self: not self._state.options.flatten)
    _state_dict_type = property(attrgetter("_settings.state_dict_type"))

    _handle = _flat_param = property(lambda self: FlatParamHandle(self._state) if self._state.flats else None)
    _has_params = property(lambda self: bool(self._state.flats))
    _all_handles = property(
        lambda self: [FlatParamHandle(state) for state in self._state.states() if state.flats]
    )
    _is_root = property(lambda self: self.check_is_root(), lambda self, value: None)

    @property
    def _fsdp_wrapped_module(self) -> nn.Module:  # type: ignore[override]
        """Returns the wrapped module; whoever walks by names of flat parameters comes to where these are listed."""
        walks = not self._use_orig_params and next(callers()).f_code.co_name == "get_submodule"
        return self._state.unit_module if walks else self.module  # type: ignore[return-value]

    @property
    def process_group(self) -> ProcessGroup:
        """Returns the group to shard over, as it was passed, or as torch knows it."""
        passed = self._passed_group.value
        if isinstance(passed, tuple):
            return passed[0]
        if isinstance(passed, torch.distributed.device_mesh.DeviceMesh):
            return passed.get_group(passed.ndim - 1)
        return torch.distributed.group.WORLD if passed is None else passed

    # ------------------------------------------------------------ what it is doing
    @property
    def training_state(self) -> TrainingState:  # type: ignore[override]
        """Says what the module is doing."""
        engine = self._state.engine
        if self._state.summoned is not None:
            return TrainingState.SUMMON_FULL_PARAMS
        if engine is not None and (engine.forwards or engine.state.task != NO_BACKWARD):
            return TrainingState.FORWARD_BACKWARD
        return TrainingState.IDLE

    _assert_state = StandIn.assert_state

    # ------------------------------------------------------------ names
    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """Lists as torch's the wrapped module: names made on the way down are those of :meth:`named_parameters`.

        transformers' Trainer sorts parameters for weight decay by such names.
        """
        return iter([(WRAPPED, self.module)]) if self._use_orig_params else super().named_children()

    def children(self) -> Iterator[nn.Module]:
        """Lists what is there, to be moved and to be set to training."""
        return iter([self._state.unit_module])  # type: ignore[list-item]

    def __setattr__(self, name: str, value: Tree) -> None:
        """Sets the wrapped module where torch's has it: activation checkpointing puts itself around it."""
        if name == WRAPPED and not isinstance(value, UnitModule):
            self._modules[WRAPPED]._fpw_module = value  # type: ignore[union-attr]
        else:
            super().__setattr__(name, value)

    def named_modules(self, *args: Tree, **kwargs: Tree) -> Iterator[tuple[str, nn.Module]]:
        """Lists names as torch's: what lists flat parameters has the name of what it wraps."""
        for name, module in super().named_modules(*args, **kwargs):
            if not (self._use_orig_params and isinstance(module, UnitModule)):
                yield ".".join(part for part in name.split(".") if part != "_fpw_module"), module

    def _named_members(self, *args: Tree, **kwargs: Tree) -> Iterator[Tree]:
        """Lists names of parameters and buffers as torch's, without what wrapping added in ``summon_full_params``."""
        for name, member in super()._named_members(*args, **kwargs):  # type: ignore[misc]
            *path, last = name.split(".")
            if last.startswith(FLAT_PREFIX) and self._state.options.flatten:
                last = "_flat_param" + f"_{last.removeprefix(FLAT_PREFIX)}".removesuffix("_0")
            yield clean(name) if self._state.summoned is not None else ".".join([*path, last]), member

    def extra_repr(self) -> str:
        """Shows place and strategy."""
        return f"rank={self.rank}, world_size={self.world_size}, {self.sharding_strategy}"

    # ------------------------------------------------------------ units
    def check_is_root(self) -> bool:
        """Says whether this is the outermost FSDP module, as far as forward has shown."""
        return self._state.is_root is not False

    def register_comm_hook(self, state: object, hook: Callable[..., object]) -> NoReturn:
        """Refuses: it is not here.

        Raises:
            ConfigurationError: always.
        """
        raise ConfigurationError(
            "register_comm_hook: no function of yours can take the place of a reduction that tells which gradients "
            "there are. To reduce in another dtype pass MixedPrecision(reduce_dtype=torch.bfloat16)"
        )

    # ------------------------------------------------------------ full parameters, norms
    @staticmethod
    @contextlib.contextmanager
    def summon_full_params(  # type: ignore[override]
        module: nn.Module,
        recurse: bool = True,
        writeback: bool = True,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
        with_grads: bool = False,
    ) -> Iterator[None]:
        """Makes parameters of the FSDP modules at and below a module full, inside, under their own names (collective).

        Args:
            module: need be no FSDP module itself.
            recurse: also below the first one.
            writeback: changes are kept. Ranks must make the same ones.
            rank0_only: accepted; every rank has full parameters.
            offload_to_cpu: accepted; they are where they are computed.
            with_grads: parameters have their full gradients, too.

        Raises:
            RedirectedError: ``writeback`` with ``rank0_only``; a NotImplementedError, as torch's.
            LifecycleError: inside of forward or backward; ``with_grads`` after ``no_sync``.
        """
        if writeback and rank0_only:
            raise RedirectedError(
                "rank0_only=True with writeback=True is not supported, it would change one rank; pass writeback=False"
            )
        found = FullyShardedDataParallel.fsdp_modules(module)
        chosen = found if recurse else [m for m in found if m is module]
        for m in chosen if with_grads else ():
            if m._state.unit.has_local_gradients():
                flat = m._state.unit.flats[0]
                raise LifecycleError(
                    f"rank {flat.group.ranks[flat.group.rank]}: gradients of {flat.names[0]!r} are this rank's own, "
                    "from a backward inside of no_sync(); full gradients are there after the next backward outside "
                    "of it"
                )
        with contextlib.ExitStack() as stack:
            for m in chosen:
                stack.enter_context(summoned(m._state, recurse, writeback))
                if with_grads:
                    stack.enter_context(whole_gradients(m._state.flats, writeback))
            yield

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """See :meth:`shardkit.FSDP.clip_grad_norm_`; warns where this rank has no gradients, as torch's does."""
        norm = super().clip_grad_norm_(max_norm, norm_type)
        if not self.params_with_grad:
            warnings.warn(
                f"Called FSDP.clip_grad_norm_() on rank {self._state.group.rank} with no gradients -- returning the "
                f"total norm in the default dtype {norm.dtype}",
                stacklevel=2,
            )
        return norm

    # ------------------------------------------------------------ state dicts
    def state_dict(self, *args: Tree, **kwargs: Tree) -> Tree:
        """Returns what :meth:`set_state_dict_type` has set, full by default; names are the wrapped module's."""
        prefix = str(args[1] if len(args) > 1 else kwargs.get("prefix", ""))
        destination = kwargs.get("destination", args[0] if args else None)
        before = set(destination or ())
        found = (self.local_state_dict if self._is_local else super().state_dict)(*args, **kwargs)
        if self._state.summoned is None and not self._state.state_is_local:
            self._settle(found, prefix, before)
        return found

    def load_state_dict(self, state_dict: SavedState, strict: bool = True, assign: bool = False) -> Tree:
        """Loads what :meth:`state_dict` gives; with LOCAL_STATE_DICT what it gave on this rank (collective)."""
        if self._is_local:
            return self.load_local_state_dict(state_dict, strict)
        return super().load_state_dict(state_dict, strict, assign)

    def _load_from_state_dict(
        self, state_dict: StateDict, prefix: str, local_metadata: StateDict, *others: Tree
    ) -> None:
        """Takes DTensors, and with LOCAL_STATE_DICT shards, in whatever module this one is (collective)."""
        is_local, keys = self._is_local, own_keys(self._state)
        own: Tree = OrderedDict((k[len(prefix) :], v) for k, v in state_dict.items() if k.startswith(prefix))
        own._metadata = {"": local_metadata}
        if is_local:
            check_own(self._state, own)
        cut = [k for k, v in own.items() if is_cut(v) and plain_name(k) in keys]
        state_dict.update((prefix + k, whole(own[k])) for k in cut)
        with local_state([self._state] if is_local else ()):
            super()._load_from_state_dict(state_dict, prefix, local_metadata, *others)

    @property
    def _is_local(self) -> bool:
        kind = self._settings.state_dict_type
        return kind is StateDictType.LOCAL_STATE_DICT and not self._state.state_is_local

    def _settle(self, found: StateDict, prefix: str, before: set[str]) -> None:
        """Makes of a unit's full entries what its settings say: none, some on the CPU, or DTensors."""
        config, kind, state = self._settings.state_dict_config, self._settings.state_dict_type, self._state
        keys = [k for k in found if k.startswith(prefix) and k not in before]
        if isinstance(config, FullStateDictConfig) and config.rank0_only and ranks_of(state).rank != 0:
            for key in keys:
                del found[key]
            return
        found.update(unsharded(state, prefix, found))
        if kind is StateDictType.SHARDED_STATE_DICT and ranks_of(state) is state.group:  # else NO_SHARD
            mesh = mesh_over(self._passed_group.value, state.group.backend.device_type)
            own = own_keys(state, prefix)
            for key in keys:
                if key in own and isinstance(found[key], torch.Tensor) and not is_cut(found[key]):
                    found[key] = cut_rows(found[key], mesh)
        if config.offload_to_cpu:
            for key in keys:
                if isinstance(found[key], torch.Tensor):
                    found[key] = found[key].cpu()

    @staticmethod
    def set_state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> StateDictSettings:
        """Says which kind of state dict the FSDP modules at and below a module make.

        Returns:
            The settings before.

        Raises:
            ConfigurationError: a configuration is for another kind.
        """
        found = FullyShardedDataParallel.fsdp_modules(module)
        before = settings_of(found)
        now = checked(state_dict_type, state_dict_config, optim_state_dict_config)
        for unit in found:
            unit._settings = now
        return before or now

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> StateDictSettings | None:
        """Returns the settings of the FSDP modules at and below a module; None where there are none.

        Raises:
            ConfigurationError: they differ.
        """
        return settings_of(FullyShardedDataParallel.fsdp_modules(module))

    @staticmethod
    @contextlib.contextmanager
    def state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> Iterator[None]:
        """Does the same for the time of a ``with`` block."""
        before = FullyShardedDataParallel.set_state_dict_type(
            module, state_dict_type, state_dict_config, optim_state_dict_config
        )
        try:
            yield
        finally:
            for unit in FullyShardedDataParallel.fsdp_modules(module):
                unit._settings = before

    # ------------------------------------------------------------ optimizer state
    # All are functions of a model, which need be no FSDP module itself.
    @staticmethod
    def optim_state_dict(
        model: nn.Module,
        optim: Optimizer,
        optim_state_dict: StateDict | None = None,
        group: ProcessGroup = None,
    ) -> StateDict:
        """Returns an optimizer's state by names of original parameters (collective).

        Args:
            model: outermost module, whose settings say whether it is full or holds DTensors.
            optim: the optimizer, made of ``model.parameters()``.
            optim_state_dict: its ``state_dict()`` by default.
            group: accepted; units know their ranks.

        Raises:
            ConfigurationError: the optimizer is not this model's.
        """
        _, own = _first_of(model)
        config = own.optim_state_dict_config
        sharded = own.state_dict_type is StateDictType.SHARDED_STATE_DICT
        how = {"rank0_only": getattr(config, "rank0_only", False), "on_cpu": config.offload_to_cpu}
        is_read_into = optim_state_dict is None and type(config) is not FullOptimStateDictConfig
        with begun(model, optim) if is_read_into else contextlib.nullcontext():
            return _gathered(model, optim, optim_state_dict, sharded=sharded, **how)

    @staticmethod
    def optim_state_dict_to_load(
        model: nn.Module,
        optim: Optimizer,
        optim_state_dict: StateDict,
        is_named_optimizer: bool = False,
        load_directly: bool = False,
        group: ProcessGroup = None,
    ) -> StateDict:
        """Returns this rank's part of such a state, for ``optim.load_state_dict`` (collective with ``rank0_only``).

        Raises:
            ConfigurationError: it is of another model, or by numbers; ``is_named_optimizer``.
        """
        if is_named_optimizer:
            raise ConfigurationError(
                "is_named_optimizer=True: optimizers that name their parameters themselves are not taken; use one of "
                "torch.optim, whose state is named here"
            )
        config = _first_of(model)[1].optim_state_dict_config
        if isinstance(config, FullOptimStateDictConfig) and config.rank0_only:
            part = _from_rank_0(model, optim, optim_state_dict, group)
        else:
            part = _cut(model, optim, optim_state_dict)
        if load_directly:
            optim.load_state_dict(part)
        return part

    @staticmethod
    def full_optim_state_dict(
        model: nn.Module,
        optim: Optimizer,
        optim_input: OptimInput | None = None,
        rank0_only: bool = True,
        group: ProcessGroup = None,
    ) -> StateDict:
        """Returns :meth:`optim_state_dict` with FULL_STATE_DICT, on the CPU."""
        _warn_of(optim_input)
        return _gathered(model, optim, None, rank0_only=rank0_only)

    @staticmethod
    def sharded_optim_state_dict(model: nn.Module, optim: Optimizer, group: ProcessGroup = None) -> StateDict:
        """Returns :meth:`optim_state_dict` with SHARDED_STATE_DICT."""
        return _gathered(model, optim, None, sharded=True)

    @staticmethod
    def shard_full_optim_state_dict(
        full_optim_state_dict: SavedState,
        model: nn.Module,
        optim_input: OptimInput | None = None,
        optim: Optimizer | None = None,
    ) -> StateDict:
        """Returns this rank's part of a full state that every rank has."""
        groups = full_optim_state_dict.get("param_groups", ())
        return _cut(model, _optimizer_of(model, optim, optim_input, groups), full_optim_state_dict)

    @staticmethod
    def flatten_sharded_optim_state_dict(
        sharded_optim_state_dict: SavedState, model: nn.Module, optim: Optimizer
    ) -> StateDict:
        """Returns this rank's part of what :meth:`sharded_optim_state_dict` returned (collective)."""
        return _cut(model, optim, sharded_optim_state_dict)

    @staticmethod
    def scatter_full_optim_state_dict(
        full_optim_state_dict: SavedState | None,
        model: nn.Module,
        optim_input: OptimInput | None = None,
        optim: Optimizer | None = None,
        group: ProcessGroup = None,
    ) -> StateDict:
        """Returns this rank's part of a full state that the first rank has (collective); others pass None."""
        return _from_rank_0(model, optim, full_optim_state_dict, group, optim_input)

    @staticmethod
    def rekey_optim_state_dict(
        optim_state_dict: SavedState,
        optim_state_key_type: OptimStateKeyType,
        model: nn.Module,
        optim_input: OptimInput | None = None,
        optim: Optimizer | None = None,
    ) -> StateDict:
        """Returns state by names of a model's parameters from state by numbers, or the other way round.

        Args:
            model: not wrapped.
            optim, optim_input: say the order of numbers; by default that of ``model.parameters()``.

        Raises:
            ConfigurationError: the keys are not what is expected, or of other parameters.
        """
        name_of = {p: plain_name(n) for n, p in model.named_parameters()}
        params = [p for g in _optimizer_of(model, optim, optim_input).param_groups for p in g["params"]]
        keys = [k for g in optim_state_dict["param_groups"] for k in g["params"]]
        by_name = all(isinstance(k, str) for k in keys)
        if by_name == (optim_state_key_type is OptimStateKeyType.PARAM_NAME):
            return dict(optim_state_dict)
        if by_name:
            position = {name_of[p]: i for i, p in enumerate(params)}
            new: dict[object, int | str | None] = {k: position.get(plain_name(k)) for k in keys}
        else:
            new = {k: name_of[params[k]] if k < len(params) else None for k in keys}
        unknown = [k for k, v in new.items() if v is None]
        if unknown:
            raise ConfigurationError(
                f"optimizer state of {unknown[0]!r}, which is no parameter of this model"
            )
        # sorted: torch goes by the places of numbers when it loads
        listed = [[new[k] for k in g["params"]] for g in optim_state_dict["param_groups"]]
        groups = [
            {**g, "params": sorted(own) if by_name else own}
            for g, own in zip(optim_state_dict["param_groups"], listed, strict=True)
        ]
        states = {new.get(k, k): v for k, v in optim_state_dict.get("state", {}).items()}
        return {**optim_state_dict, "state": states, "param_groups": groups}


# ------------------------------------------------------------ settings of state dicts
_CONFIGS: dict[StateDictType, tuple[type[StateDictConfig], type[OptimStateDictConfig]]] = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.LOCAL_STATE_DICT: (LocalStateDictConfig, LocalOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
}


def checked(
    kind: StateDictType, config: StateDictConfig | None, optim_config: OptimStateDictConfig | None
) -> StateDictSettings:
    """Returns settings of a kind, with torch's defaults.

    Raises:
        ConfigurationError: a configuration is for another kind.
    """
    wanted = _CONFIGS[kind]
    config = wanted[0]() if config is None else config
    optim_config = wanted[1]() if optim_config is None else optim_config
    for given, type_ in zip((config, optim_config), wanted, strict=True):
        if type(given) is not type_:
            raise ConfigurationError(
                f"Expected state_dict_config of type {type_.__name__}, which goes with {kind}, and got a "
                f"{type(given).__name__}"
            )
    return StateDictSettings(kind, config, optim_config)


def settings_of(units: Iterable[FullyShardedDataParallel]) -> StateDictSettings | None:
    """Returns those that all units have; None where there are no units.

    Raises:
        ConfigurationError: units have different ones.
    """
    found = [unit._settings for unit in units]
    for other in found:
        if other != found[0]:
            raise ConfigurationError(
                f"FSDP modules have different settings for state dicts, {found[0]} and {other}; call "
                "FSDP.set_state_dict_type with the outermost module"
            )
    return found[0] if found else None


# ------------------------------------------------------------ what becomes of a full state dict
def own_keys(state: ShardingState, prefix: str = "") -> set[str]:
    """Returns keys of a unit's own parameters in a full state dict."""
    names = [n for flat in state.flats for n in flat.names] + [other for _, other in state.shared_paths]
    return {prefix + plain_name(n) for n in names}


def unsharded(state: ShardingState, prefix: str, found: StateDict) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields a unit's buffers and ignored parameters by key; not where a module, or a hook, has put another value."""
    own = own_keys(state, prefix)
    for path, m in modules_outside_units(state.module):
        for name, tensor in (*m._parameters.items(), *m._buffers.items()):
            key = prefix + plain_name(dotted(path, name))
            value: Tree = found.get(key)
            if tensor is None or key in own or getattr(value, "dtype", None) != tensor.dtype:
                continue
            if value.device == tensor.device and (tensor.is_meta or torch.equal(value, tensor)):
                yield key, tensor.detach()


def ranks_of(state: ShardingState) -> Group:
    """Returns the ranks that share a unit's work, of which the first keeps what only one keeps."""
    return state.group if state.group.world_size > 1 or state.replicas is None else state.replicas


# ------------------------------------------------------------ torch's private handles
class FlatParamHandle:
    """Answers for a unit what verl and accelerate, who move and cast shards, ask torch's; all else its shard answers.

    Of several flat parameters it shows one that is trained, in half precision if there is one; the others follow.
    """

    def __init__(self, state: ShardingState) -> None:
        self._state = state
        self._flat = max(state.flats, key=lambda flat: (flat.trains, flat.param.dtype != torch.float32))
        self._local_shard = self.data
        self._fqns = [name for flat in state.flats for name in flat.names]

    flat_param = property(lambda self: self)
    uses_sharded_strategy = property(lambda self: self._flat.group.world_size > 1)
    _offload_params = property(attrgetter("_state.options.offload.parameters"))
    _params = property(lambda self: [m.param for flat in self._state.flats for m in flat.originals])
    _full_param_padded = property(attrgetter("_flat.store.gathered"))

    @property
    def data(self) -> torch.Tensor:
        """Returns this rank's shard, [S]; set to one on another device, or of another dtype, it is moved or cast."""
        return self._flat.param.data

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        is_cast = values.dtype != self._flat.param.dtype
        begin_move(self._state)
        for flat in self._state.flats:
            own = values if flat is self._flat else flat.param.data.to(values.device)
            own = own.to(values.dtype) if is_cast and own.is_floating_point() else own
            if flat.shards is None:
                flat.param.data = own
            for r in () if flat.shards is None else flat.shards.each:
                r.param.data = r.part(own)
        end_move(self._state)

    def flat_param_to(self, *args: Tree, **kwargs: Tree) -> None:
        """Moves the shard, or casts it, as ``Tensor.to``."""
        self.data = self.data.to(*args, **kwargs)

    def reshard(self, free_unsharded_flat_param: bool) -> None:
        """Gives back what forward has left gathered."""
        if free_unsharded_flat_param:
            self._state.unit.release()

    def __getattr__(self, name: str) -> Tree:
        return getattr(self._flat.param, name)


# ------------------------------------------------------------ full gradients
@contextlib.contextmanager
def whole_gradients(flats: Sequence[FlatParam], writeback: bool) -> Iterator[None]:
    """Shows, inside, original parameters' reduced gradients, in full shape; None where there is none (collective).

    Args:
        flats: whose original parameters are summoned.
        writeback: changes are kept. Ranks must make the same ones.
    """
    listings = [listing for flat in flats for listing in flat.listings if listing.param.grad is not None]
    try:
        for listing in listings:
            unused = listing.flat.unused.originals[listing.first :]
            parts = gather_parts(listing, listing.param.grad)  # type: ignore[arg-type]
            for original, part, is_unused in zip(listing.originals, parts, unused, strict=False):
                original.param.grad = None if is_unused else part.to(original.param)
        yield
        for listing in listings if writeback else ():
            if (gradient := listing.param.grad) is None:
                continue
            found = [(m.shape.numel(), m.param.grad) for m in listing.originals]
            rows = [gradient.new_zeros(n) if g is None else g.reshape(-1).to(gradient) for n, g in found]
            own = put_together(rows, listing.layout)[listing.layout.part(listing.group.rank)]
            gradient.detach().copy_(own.view(gradient.shape))
    finally:
        for flat in flats:
            for original in flat.originals:
                original.param.grad = None


# ------------------------------------------------------------ optimizers made before, or for each parameter
def _follow(unit: nn.Module, _: object) -> None:
    """Leads optimizers of the model as it was to its shards, once it is called: with ``use_orig_params`` torch's serve.

    Those that have stepped before are left alone; their next step is refused.
    """
    hooks = unit._forward_pre_hooks
    for number in [k for k, hook in hooks.items() if hook is _follow]:
        del hooks[number]
    if not isinstance(unit, FullyShardedDataParallel):
        return
    if not unit._use_orig_params and any(hasattr(p, MADE) for p in unit.params):
        raise ConfigurationError("a step in backward is only supported with use_orig_params=True")
    if unit._state.is_root is False or not unit._use_orig_params:
        return  # inside of one that has been called
    flats = {*unit._state.all_flats()}
    # listed first: before torch 2.10 no tensor may come to its end while all objects are looked at
    for found in [o for o in gc.get_objects() if issubclass(type(o), Optimizer)]:
        groups = getattr(found, "param_groups", ())  # one that combines others may have none
        own = [p for g in groups for p in g["params"] if managing(p) in flats]
        if own and not isinstance(found, OSS | WholeParameters) and not any(map(found.state.get, own)):
            follow_shards(found)


# ------------------------------------------------------------ optimizer state
def _first_of(model: nn.Module) -> tuple[FullyShardedDataParallel, StateDictSettings]:
    """Returns the outermost unit of a model, and the settings of all."""
    found = FullyShardedDataParallel.fsdp_modules(model)
    own = settings_of(found)
    if own is None:
        raise ConfigurationError(f"no FSDP module is in this {type(model).__name__}; pass the wrapped model")
    return found[0], own


def _cut(model: nn.Module, optim: Optimizer, state: SavedState) -> StateDict:
    part = _part(model, optim, state.get("param_groups", ()), from_state(_plain(state.get("state", {}))))
    if "param_groups" not in state:  # whoever left them out has them
        del part["param_groups"]
    return part


def _plain(state: SavedState) -> StateDict:
    """Returns state by names, without what wrapping added; none where no step was counted: the first one makes it."""
    named = {plain_name(n): values for n, values in state.items() if isinstance(n, str)}
    return {n: values for n, values in named.items() if torch.as_tensor(values.get("step", 1)).any()}


def _part(model: nn.Module, optim: Optimizer, groups: Iterable[ParamGroup], source: Source) -> StateDict:
    named = [
        {**g, "params": [plain_name(n) if isinstance(n, str) else n for n in g["params"]]} for g in groups
    ]
    return shard_by_name(_parameters_of(model, optim), optim, named, source)


def _parameters_of(model: nn.Module, optim: Optimizer) -> dict[int, Held]:
    if _first_of(model)[0]._use_orig_params:
        follow_shards(optim)
    return parameters_of(model, optim)


_FROM_ZEROS = {getattr(torch.optim, n) for n in ("Adam", "AdamW", "Adamax", "Adadelta", "RMSprop", "SGD")}


@contextlib.contextmanager
def begun(model: nn.Module, optim: Optimizer) -> Iterator[None]:
    """Gives an optimizer that never stepped state to read a checkpoint into, inside: where it can be, that of before.

    Whoever asks may save it, and go on from there.
    """
    _parameters_of(model, optim)
    optim = getattr(optim, "optimizer", optim)  # accelerate's steps may need its scaler
    groups = optim.param_groups
    if optim.state:
        yield
        return
    before = [dict(g) for g in groups]  # some count there, too
    gradients = [(p, p.grad) for g in groups for p in g["params"]]
    try:
        for p, _ in gradients:
            p.grad = None  # where there is one torch does nothing, on this rank alone
        _init_optim_state(optim)
        # whether a step from state that is all zeros is its first one
        from_zeros = type(optim) in _FROM_ZEROS and not any(g.get("dampening") for g in groups)
        for values in optim.state.values():
            zeros = values if from_zeros else {"step"} & values.keys()
            values.update({key: values[key] * 0 for key in zeros})
        yield
    finally:
        optim.state.clear()
        for group, options in zip(groups, before, strict=True):
            group.clear()
            group.update(options)
        for p, gradient in gradients:
            p.grad = gradient


def _gathered(
    model: nn.Module,
    optim: Optimizer,
    state: StateDict | None,
    *,
    sharded: bool = False,
    rank0_only: bool = False,
    on_cpu: bool = True,
) -> StateDict:
    """Gathers state by names (collective): whole values, on the first rank alone with ``rank0_only``; or DTensors."""
    first, _ = _first_of(model)
    units = FullyShardedDataParallel.fsdp_modules(model)
    replicas = {id(f.param): m._state.replicas for m in units for f in m._state.listings}

    def form(slot: Slot, part: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        if sharded:
            if slot.group is None or (slot.world_size == 1 and replicas.get(id(slot.param)) is not None):
                return part
            part = cut_rows(part, mesh_over(first._passed_group.value, slot.group.backend.device_type))
        return part.cpu() if on_cpu else part.to(like.device)

    saved = optim.state_dict() if state is None else state
    keep = not rank0_only or ranks_of(first._state).rank == 0
    return gather_by_name(_parameters_of(model, optim), optim, saved, form, keep)


def _from_rank_0(
    model: nn.Module,
    optim: Optimizer | None,
    state: SavedState | None,
    group: ProcessGroup,
    optim_input: OptimInput | None = None,
) -> StateDict:
    """Returns the same where only the first rank has the state (collective)."""
    ranks = backend_of_job().group(group)
    control = ranks.channel("control")
    mine = state if ranks.rank == 0 else None
    told = None if mine is None else mine.get("param_groups", [])
    groups = control.broadcast_object(told, 0, label="optimizer options of rank 0")
    if groups is None:
        raise ConfigurationError("the first rank passed no optimizer state; it has to have the full one")
    optim = _optimizer_of(model, optim, optim_input, groups)
    return _part(model, optim, groups, from_rank_0(_plain((mine or {}).get("state", {})), ranks))


def _warn_of(optim_input: OptimInput | None) -> None:
    if optim_input is not None:
        text = "The `optim_input` argument is deprecated. Pass the optimizer as `optim` instead"
        warnings.warn(text, FutureWarning, stacklevel=4)


def _optimizer_of(
    model: nn.Module,
    optim: Optimizer | None,
    optim_input: OptimInput | None,
    saved: Sequence[ParamGroup] = (),
) -> Optimizer:
    """Returns the optimizer, or one that stands for the parameters which an optimizer was given.

    Where neither is known, it has all of the model's, in the groups of a saved state, as torch takes them.
    """
    _warn_of(optim_input)
    if optim is not None:
        return optim
    given = [*model.parameters()] if optim_input is None else [*optim_input]
    if optim_input is None and len(saved) > 1:
        group_of = {
            plain_name(name): k for k, g in enumerate(saved) for name in g["params"] if isinstance(name, str)
        }
        of_model = _parameters_of(model, torch.optim.SGD(given, lr=0.0))
        number = {p: group_of.get(of_model[id(p)].keys[0], 0) for p in given}
        given = [{"params": [p for p in given if number[p] == k]} for k in range(len(saved))]
    # an optimizer fills in dicts that it is given: these stay the caller's
    copied = [{"params": g["params"]} if isinstance(g, dict) else g for g in given]
    return torch.optim.SGD(copied, lr=0.0)  # type: ignore[arg-type]


# ------------------------------------------------------------ torch's arguments, as the core's
HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)
_KEEPING = (ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy._HYBRID_SHARD_ZERO2)
_LOCAL = "LOCAL_WORLD_SIZE"  # as torchrun sets it


def groups_of(
    strategy: ShardingStrategy, process_group: ProcessGroup, mesh: DeviceMesh | None
) -> tuple[ProcessGroup, ProcessGroup]:
    """Returns the ranks that a strategy shards over, and those that hold the same shard.

    Raises:
        ConfigurationError: they are not what the strategy needs.
    """
    is_hybrid = strategy in HYBRID
    if mesh is not None:
        if mesh.ndim != 1 + is_hybrid:
            raise ConfigurationError(
                f"device_mesh has {mesh.ndim} dimensions and {strategy} takes {1 + is_hybrid}: hybrid strategies "
                "average gradients over the first and shard over the second; others shard over one, mesh[name]"
            )
        process_group = (mesh.get_group(1), mesh.get_group(0)) if is_hybrid else mesh.get_group(0)
    if not is_hybrid:
        if isinstance(process_group, tuple):
            raise ConfigurationError(
                f"process_group is a tuple of groups, which HYBRID_SHARD takes; {strategy} takes one"
            )
        if strategy is ShardingStrategy.NO_SHARD and backend_of_job().group(process_group).world_size > 1:
            return hybrid_groups(1, process_group)
        return group_for(process_group), None
    if process_group is None:
        size = os.environ.get(_LOCAL)
        if size is None:
            raise ConfigurationError(
                f"{strategy} requires explicit specification of process group or device_mesh, two-dimensional, where "
                f"{_LOCAL} does not say how many ranks a machine has (torchrun sets it)"
            )
        return hybrid_groups(int(size))
    if not isinstance(process_group, tuple) or len(process_group) != 2:
        raise ConfigurationError(
            f"Expected process_group to be passed in as either None or (shards, replicas): {process_group!r}"
        )
    return process_group


# ------------------------------------------------------------ what is left alone
def ignored_of(
    module: nn.Module,
    modules: Iterable[nn.Module] | None,
    states: Iterable[nn.Parameter] | Iterable[nn.Module] | None,
) -> Ignored:
    """Finds what is not to be sharded, also by what units below were told.

    Raises:
        ConfigurationError: both are given; an element is neither module nor parameter, or a sharded module.
    """
    if modules is not None and states is not None:
        raise ConfigurationError(
            "Cannot pass both ignored_modules and ignored_states at the same time: the former is an older name; pass "
            "ignored_states alone"
        )
    found = Ignored()
    for item in (*(modules or ()), *(states or ())):
        if isinstance(item, Door):
            raise ConfigurationError(
                "`ignored_modules` should not include FSDP modules themselves; ignore what they wrap"
            )
        if isinstance(item, nn.Module):
            found.modules.update(m for m in item.modules() if not isinstance(m, Door))
        elif isinstance(item, nn.Parameter) and modules is None:
            found.parameters.add(item)
        else:
            raise ConfigurationError(
                f"what is ignored are modules or (in ignored_states) parameters, not {type(item).__name__}"
            )
    for m in module.modules():
        if isinstance(m, Door):
            found.modules |= m._state.ignored.modules
            found.parameters |= m._state.ignored.parameters
    for m in found.modules:
        found.parameters.update(p for p in m._parameters.values() if p is not None)
    return found


# ------------------------------------------------------------ where
def device_of(device_id: int | torch.device | None, backend: Backend) -> torch.device | None:
    """Returns the device that is named; None if none is."""
    if device_id is None:
        return None
    if isinstance(device_id, int):
        index = () if backend.device_type == "cpu" else (device_id,)
        return torch.device(backend.device_type, *index)
    device = torch.device(device_id)
    return backend.device() if device.type == backend.device_type and device.index is None else device


# ------------------------------------------------------------ which modules become units: torch's policies
def wrap_below(
    root: nn.Module, policy: object, ignored: Ignored, wrapper: AnyCallable, arguments: Kwargs
) -> None:
    """Wraps what a policy chooses below a module, in place.

    Args:
        root: stays as it is itself.
        policy: a function or an object of ``torch.distributed.fsdp.wrap``, or one like them.
        ignored: neither wrapped nor counted.
        wrapper: called with a module and ``arguments``.

    Raises:
        WrapError: something is wrapped already.
        ConfigurationError: the policy is none.
    """
    mixed: MixedPrecision | None = arguments["mixed_precision"]
    asked = adapt_policy(policy, root, ignored.modules, arguments)
    if mixed is not None and mixed._module_classes_to_ignore:
        asked = _InFullPrecision(asked, tuple(mixed._module_classes_to_ignore))
    context = WrapContext(
        wrapper,
        kwargs=arguments,
        uncounted=frozenset(ignored.parameters),
        ignored=frozenset(ignored.modules),
        keeps_root=True,
    )
    wrap_tree(root, asked, {}, context=context)


class _InFullPrecision(AdaptedPolicy):
    """A policy by which modules that stay in full precision are units of their own."""

    def __init__(self, policy: AdaptedPolicy, classes: tuple[type[nn.Module], ...]) -> None:
        self._others, self._classes = policy, classes
        self._closed: set[nn.Module] = set()  # not looked into, but for what stays in full precision

    def descend(self, module: nn.Module, numel: int, is_root: bool) -> bool:
        if module in self._closed or not self._others.descend(module, numel, is_root):
            self._closed.update(module.modules())
        return True

    def arguments(self, module: nn.Module, numel: int, is_root: bool) -> StateDict | None:
        if isinstance(module, self._classes):
            _InFloat32(module)
            return {"mixed_precision": None}
        return None if module in self._closed else self._others.arguments(module, numel, is_root)


class _InFloat32:
    """Hooks of a module that computes in fp32, whatever comes in; goes out what came in."""

    def __init__(self, module: nn.Module) -> None:
        self._dtype: torch.dtype | None = None
        module.register_forward_pre_hook(self._before, with_kwargs=True)
        module.register_forward_hook(self._after)

    def _before(self, module: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        floats = [
            v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor) and v.is_floating_point()
        ]
        self._dtype = floats[0].dtype if floats else None
        args, kwargs = cast_inputs((args, kwargs), torch.float32)
        return args, kwargs

    def _after(self, module: nn.Module, args: Args, output: Tree) -> Tree:
        return output if self._dtype is None else cast_inputs(output, self._dtype)


# ------------------------------------------------------------ start values, of what is on another device
# Parameters that took the place of others on the meta device, which units still to come may share.
_replaced: WeakIdKeyDictionary = WeakIdKeyDictionary()


def materialize(module: nn.Module, init: Callable[[nn.Module], object] | None) -> None:
    """Gives a module's own parameters their initial values if they are on the meta device.

    Args:
        init: initialises the module; default: its ``reset_parameters()``.

    Raises:
        ConfigurationError: there is no ``reset_parameters()`` either.
    """
    params = [p for _, m in modules_outside_units(module) for p in m._parameters.values()]
    if any(p is not None and p.is_meta for p in params):
        (init or partial(_reset, device=torch.device("cpu")))(module)


def materialize_each(
    module: nn.Module, init: Callable[[nn.Module], object] | None, device: torch.device, ignored: Ignored
) -> None:
    """Does the same module by module, as torch's FSDP does it.

    Weights that were shared are shared afterwards, also with modules of which other units were made.

    Args:
        init: called with every module that is not in another unit, parents first; default: those with parameters or
            buffers are emptied onto ``device``, and their ``reset_parameters()`` is called.
        ignored: stays as it is; parameters that take the place of ignored ones are added.

    Raises:
        ConfigurationError: a module has no ``reset_parameters()``; one is still on the meta device after ``init``.
    """
    own = [m for _, m in modules_outside_units(module, without=ignored.modules)]
    before = [(m, n, _replaced.get(p, p)) for m in own for n, p in m._parameters.items() if p is not None]
    others = [(m, n, p) for m, n, p in before if managing(p) is not None]  # of other units
    before = [(m, n, p) for m, n, p in before if managing(p) is None]
    buffers = [b for m in own for b in m.buffers(recurse=False)]
    if any(t.is_meta for t in (*buffers, *(p for _, _, p in before if p not in ignored.parameters))):
        for m, name, p in others:  # what is to be initialized is no shard
            m._parameters[name] = nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device="meta"))
        for m in own:
            if init is not None:
                init(m)
            elif any(True for _ in (*m.parameters(recurse=False), *m.buffers(recurse=False))):
                _reset(m, device, recurse=False)
        _put_back(before, ignored)
    for m, name, p in others:
        m._parameters[name] = p


def _put_back(before: Iterable[tuple[nn.Module, str, nn.Parameter]], ignored: Ignored) -> None:
    """Shares weights again that were shared."""
    first: dict[nn.Parameter, nn.Parameter | None] = {}
    for m, name, old in before:
        now = first.setdefault(old, m._parameters[name])
        m._parameters[name] = now
        if now is not None and now is not old:
            _replaced[old] = now
        if old in ignored.parameters and now is not None:
            ignored.parameters.add(now)
        elif now is not None and now.is_meta:
            raise ConfigurationError(
                f"parameter {name!r} of a {type(m).__name__} is still on the meta device after param_init_fn, which "
                "is called with each module: it has to give the module's own parameters values, on any rank whose "
                "values count, or memory (module.to_empty(device=..., recurse=False))"
            )


@torch.no_grad()
def _reset(module: nn.Module, device: torch.device, recurse: bool = True) -> None:
    reset = getattr(module, "reset_parameters", None)
    if reset is None:
        raise ConfigurationError(
            f"parameters or buffers of {type(module).__name__} are on the meta device and it has no reset_parameters() "
            "to initialise them; pass param_init_fn"
        )
    module.to_empty(device=device, recurse=recurse)
    reset()


def broadcast_buffers(modules: Iterable[tuple[str, nn.Module]], groups: Sequence[Group]) -> None:
    """Makes buffers of these modules themselves those of each group's first rank, in turn (collective).

    Raises:
        RankMismatchError: ranks have others, or of other shapes.
    """
    found = {
        f"{path}.{n}" if path else n: b for path, m in modules for n, b in m._buffers.items() if b is not None
    }
    for group in groups:
        facts = [(name, (shape_fact(b), str(b.dtype))) for name, b in found.items()]
        check_same_everywhere(group, facts, "buffers of the wrapped module")
        if group.world_size > 1:
            for name, buffer in found.items():
                group.channel("buffers").broadcast(buffer, 0, label=f"buffer {name} of rank 0")
