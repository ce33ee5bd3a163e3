"""torch.distributed.fsdp.FullyShardedDataParallel, FSDP1, on shardkit's FSDP."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NoReturn

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import OptimStateKeyType
from torch.distributed.fsdp.api import (  # noqa: F401 - also for those who look for them here
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

from shardkit.backend import backend_of_job
from shardkit.errors import ConfigurationError, LifecycleError
from shardkit.fsdp.flat_param import FlatParam
from shardkit.fsdp.flat_values import AlignedLayout, EachAlone, put_together
from shardkit.fsdp.optim_state import gather_parts
from shardkit.fsdp.registered import Registered
from shardkit.fsdp.state import Ignored, Options, modules_outside_units, summoned
from shardkit.fsdp.unit import Unit
from shardkit.nn.data_parallel.fsdp_facts import PassedGroup
from shardkit.torch_fsdp.arguments import broadcast_buffers, materialize_each, move_buffers, move_from_host
from shardkit.types import Kwargs, ProcessGroup, Tree

from . import api, arguments, facts
from .optimizer_states import OptimizerStates

__all__ = [*api.__all__, "FullyShardedDataParallel", "OptimStateKeyType"]

_NOT_HANDED_ON = ("self", "__class__", "module", "auto_wrap_policy", "ignored_modules", "ignored_states")
_SHOWN = ("backward_prefetch", "forward_prefetch", "limit_all_gathers")


class FullyShardedDataParallel(OptimizerStates):
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
        arguments.check_kinds(
            sharding_strategy, cpu_offload, backward_prefetch, mixed_precision, device_mesh, process_group
        )
        ignored = arguments.ignored_of(module, ignored_modules, ignored_states)
        if auto_wrap_policy is not None:
            below = {**given, "ignored_states": [*ignored.modules, *ignored.parameters]}
            arguments.wrap_below(module, auto_wrap_policy, ignored, FullyShardedDataParallel, below)
        self._wrap(module, ignored, given)
        self.__dict__.update({name: given[name] for name in _SHOWN})
        self._settings = facts.checked(StateDictType.FULL_STATE_DICT, None, None)
        self.register_load_state_dict_pre_hook(facts.gather_loaded)

    def _wrap(self, module: nn.Module, ignored: Ignored, given: Kwargs) -> None:
        """Gives the module start values where it is to be, and shards it."""
        strategy = given["sharding_strategy"] or ShardingStrategy.FULL_SHARD
        offload, mixed = given["cpu_offload"], given["mixed_precision"]
        group, replicas = arguments.groups_of(strategy, given["process_group"], given["device_mesh"])
        backend = backend_of_job()
        device = arguments.device_of(given["device_id"], backend)
        materialize_each(module, given["param_init_fn"], device or backend.device(), ignored)
        own = [m for _, m in modules_outside_units(module, without=ignored.modules)]
        if device is not None:
            move_from_host(own, device, ignored.parameters)
        offloads = offload is not None and offload.offload_params
        params = [p for m in own for p in m.parameters(recurse=False) if p not in ignored.parameters]
        compute = arguments.compute_device(params, offloads, backend)
        prefetches = given["backward_prefetch"] is not None or given["forward_prefetch"]
        options = Options(
            group=group,
            replicas=replicas,
            flatten=not given["use_orig_params"],
            layout=EachAlone(AlignedLayout(None)) if given["use_orig_params"] else AlignedLayout(None),
            device=compute,
            **arguments.policies(strategy, mixed, offload, prefetches),
        )
        self._shard(module, options, ignored)
        if compute is not None:
            move_buffers(module, compute)
        if given["sync_module_states"]:
            ranks = [self._state.group] + ([] if self._state.replicas is None else [self._state.replicas])
            broadcast_buffers(self._state.own_modules(), ranks)
        self._passed_group = PassedGroup(given["device_mesh"] or given["process_group"])
        self.sharding_strategy = strategy
        self.mixed_precision = mixed or MixedPrecision()
        self.cpu_offload = offload or CPUOffload()

    # ------------------------------------------------------------ units
    def check_is_root(self) -> bool:
        """Whether this is the outermost FSDP module, as far as forward has shown."""
        return self._state.is_root is not False

    def register_comm_hook(self, state: object, hook: Callable[..., object]) -> NoReturn:
        """Not here.

        Raises:
            ConfigurationError: always.
        """
        raise ConfigurationError(
            "register_comm_hook: a unit's gradients are packed and reduced together with what tells which of them "
            "there are, and no function of yours can take its place. To reduce in another dtype pass "
            "MixedPrecision(reduce_dtype=torch.bfloat16)"
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
        """Inside, parameters of the FSDP modules at and below a module are full, under their own names (collective).

        Args:
            module: need be no FSDP module itself.
            recurse: also below the first one.
            writeback: changes are kept. Ranks must make the same ones.
            rank0_only: accepted; every rank has full parameters.
            offload_to_cpu: accepted; they are where they are computed.
            with_grads: parameters have their full gradients, too.

        Raises:
            ConfigurationError: ``writeback`` with ``rank0_only``.
            LifecycleError: inside of forward or backward; ``with_grads`` after ``no_sync``.
        """
        if writeback and rank0_only:
            raise ConfigurationError(
                "rank0_only=True with writeback=True would change one rank's parameters alone; pass writeback=False"
            )
        found = FullyShardedDataParallel.fsdp_modules(module)
        chosen = found if recurse else [m for m in found if m is module]
        if with_grads:
            check_reduced(m._state.unit for m in chosen)
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
        found = super().state_dict(*args, **kwargs)
        if self._state.summoned is None and not self._state.state_is_local:
            facts.settle(self, self._settings, found, prefix, before, self._passed_group.value)
        return found

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
            ConfigurationError: LOCAL_STATE_DICT; a configuration is for another kind.
        """
        found = FullyShardedDataParallel.fsdp_modules(module)
        before = facts.settings_of(found)
        now = facts.checked(state_dict_type, state_dict_config, optim_state_dict_config)
        for unit in found:
            unit._settings = now
        return before or now

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> StateDictSettings | None:
        """Returns the settings of the FSDP modules at and below a module; None where there are none.

        Raises:
            ConfigurationError: they differ.
        """
        return facts.settings_of(FullyShardedDataParallel.fsdp_modules(module))

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


# ------------------------------------------------------------ full gradients
def check_reduced(units: Iterable[Unit]) -> None:
    """To be called before the original parameters are summoned.

    Raises:
        LifecycleError: there are gradients that ``no_sync`` keeps, which are not reduced yet.
    """
    for unit in units:
        if unit.has_local_gradients():
            flat = unit.flats[0]
            raise LifecycleError(
                f"rank {flat.group.ranks[flat.group.rank]}: gradients of {flat.names[0]!r} are this rank's own, from a "
                "backward inside of no_sync(); full gradients are there after the next backward outside of it"
            )


@contextlib.contextmanager
def whole_gradients(flats: Sequence[FlatParam], writeback: bool) -> Iterator[None]:
    """Inside, original parameters have their reduced gradients, in full shape; None where there is none (collective).

    Args:
        flats: whose original parameters are summoned.
        writeback: changes are kept. Ranks must make the same ones.

    """
    try:
        for flat in flats:
            for listing in flat.listings:
                _show(listing)
        yield
        for flat in flats if writeback else ():
            for listing in flat.listings:
                _keep(listing)
    finally:
        for flat in flats:
            for original in flat.originals:
                original.param.grad = None


def _show(listing: Registered) -> None:
    gradient, unused = listing.param.grad, listing.flat.unused.originals[listing.first :]
    if gradient is None:
        return
    parts = gather_parts(listing, gradient)
    for original, part, is_unused in zip(listing.originals, parts, unused, strict=False):
        if not is_unused:
            original.param.grad = part.to(original.param)


@torch.no_grad()
def _keep(listing: Registered) -> None:
    gradient = listing.param.grad
    if gradient is None:
        return
    rows = [
        gradient.new_zeros(m.shape.numel()) if m.param.grad is None else m.param.grad.reshape(-1).to(gradient)
        for m in listing.originals
    ]
    own = put_together(rows, listing.layout)[listing.layout.part(listing.group.rank)]
    gradient.copy_(own.view(gradient.shape))
