"""Translates arguments of torch's FullyShardedDataParallel to the core's, and does what they ask for at the start."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp.api import (
    BackwardPrefetch,
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
)
from torch.utils.weak import WeakIdKeyDictionary

from shardkit.backend import Backend, Group, backend_of_job
from shardkit.checks import check_same_everywhere, shape_fact
from shardkit.errors import ConfigurationError
from shardkit.fsdp import hybrid_groups
from shardkit.fsdp.forward import cast_inputs
from shardkit.fsdp.originals import managing
from shardkit.fsdp.state import Ignored, modules_outside_units
from shardkit.fsdp.wrapper import Door
from shardkit.policy import OffloadPolicy, PrecisionPolicy, ReducePolicy, ReshardPolicy
from shardkit.types import AnyCallable, Args, Kwargs, ProcessGroup, StateDict, Tree
from shardkit.wrapping.context import WrapContext, wrap_tree
from shardkit.wrapping.policies import adapt_policy

HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)
_KEEPING = (ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy._HYBRID_SHARD_ZERO2)
_LOCAL = "LOCAL_WORLD_SIZE"  # as torchrun sets it


def check_kinds(
    strategy: object, offload: object, prefetch: object, mixed: object, mesh: object, process_group: object
) -> None:
    """Raises ConfigurationError for arguments of another kind than torch takes."""
    for name, value, kind in (
        ("sharding_strategy", strategy, ShardingStrategy),
        ("cpu_offload", offload, CPUOffload),
        ("backward_prefetch", prefetch, BackwardPrefetch),
        ("mixed_precision", mixed, MixedPrecision),
        ("device_mesh", mesh, DeviceMesh),
    ):
        if value is not None and not isinstance(value, kind):
            raise ConfigurationError(f"{name} is {value!r}; pass a {kind.__name__} of torch, or None")
    if mesh is not None and process_group is not None:
        raise ConfigurationError("pass process_group or device_mesh, not both: a mesh has its groups")


def groups_of(
    strategy: ShardingStrategy, process_group: ProcessGroup, mesh: DeviceMesh | None
) -> tuple[ProcessGroup, ProcessGroup]:
    """Returns the ranks that a strategy shards over, and those that hold the same shard.

    Raises:
        ConfigurationError: they are not what the strategy needs.
    """
    if strategy in HYBRID:
        return _hybrid(strategy, process_group, mesh)
    if mesh is not None:
        if mesh.ndim != 1:
            raise ConfigurationError(
                f"device_mesh has {mesh.ndim} dimensions and {strategy} shards over one: pass mesh[name] of that one, "
                "or a hybrid strategy, which averages gradients over the first and shards over the second"
            )
        process_group = mesh.get_group(0)
    if isinstance(process_group, tuple):
        raise ConfigurationError(
            f"process_group is a tuple of groups, which HYBRID_SHARD takes; {strategy} takes one"
        )
    if strategy is ShardingStrategy.NO_SHARD and backend_of_job().group(process_group).world_size > 1:
        return hybrid_groups(1, process_group)
    return process_group, None


def _hybrid(
    strategy: ShardingStrategy, process_group: ProcessGroup, mesh: DeviceMesh | None
) -> tuple[ProcessGroup, ProcessGroup]:
    if mesh is not None:
        if mesh.ndim != 2:
            raise ConfigurationError(
                f"device_mesh has {mesh.ndim} dimensions; {strategy} needs two: replicas, then shards"
            )
        return mesh.get_group(1), mesh.get_group(0)
    if process_group is None:
        size = os.environ.get(_LOCAL)
        if size is None:
            raise ConfigurationError(
                f"{strategy} without groups shards over the ranks of a machine, and {_LOCAL} does not say how many "
                "these are (torchrun sets it). Pass process_group=(shards, replicas), or a two-dimensional device_mesh"
            )
        return hybrid_groups(int(size))
    if not isinstance(process_group, tuple) or len(process_group) != 2:
        raise ConfigurationError(
            f"process_group is {process_group!r}; {strategy} takes (ranks to shard over, replicas), or None"
        )
    return process_group


def policies(
    strategy: ShardingStrategy, mixed: MixedPrecision | None, offload: CPUOffload | None, prefetches: bool
) -> Kwargs:
    """Fields of ``Options``."""
    mixed = mixed or MixedPrecision(cast_forward_inputs=True)
    return {
        "precision": PrecisionPolicy(compute=mixed.param_dtype, buffers=mixed.buffer_dtype),
        "reduce": ReducePolicy(dtype=mixed.reduce_dtype),
        "casts_inputs": mixed.cast_forward_inputs,
        "casts_root_inputs": mixed.cast_root_forward_inputs,
        "reshard": ReshardPolicy(strategy not in _KEEPING, prefetch=int(prefetches)),
        "offload": OffloadPolicy(parameters=offload is not None and offload.offload_params),
    }


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
        raise ConfigurationError("pass ignored_states alone: ignored_modules is an older name for it")
    found = Ignored()
    for item in (*(modules or ()), *(states or ())):
        if isinstance(item, Door):
            raise ConfigurationError(
                "ignored modules can't be FSDP modules themselves; ignore what they wrap"
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
        return (
            torch.device("cpu")
            if backend.device_type == "cpu"
            else torch.device(backend.device_type, device_id)
        )
    device = torch.device(device_id)
    return backend.device() if device.type == backend.device_type and device.index is None else device


def compute_device(params: Iterable[nn.Parameter], offloads: bool, backend: Backend) -> torch.device | None:
    """Returns the device that computes with what stays on the host between steps; None: where it is."""
    if not offloads or backend.device_type == "cpu" or not backend.has_storage:
        return None
    return backend.device() if all(p.device.type == "cpu" for p in params) else None


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
    full_precision = () if mixed is None else tuple(mixed._module_classes_to_ignore)
    asked = _CorePolicy(root, policy, ignored, full_precision, arguments)
    context = WrapContext(wrapper, kwargs=arguments, uncounted=frozenset(ignored.parameters))
    wrap_tree(root, asked, {}, context=context)


class _Planned:
    """An object of torch's that plans with what is ignored here."""

    def __init__(self, policy: Tree, ignored: Ignored, arguments: Kwargs) -> None:
        self._policy, self._ignored, self._arguments = policy, ignored, arguments

    def _run_policy(
        self, root_module: nn.Module, ignored_modules: set[nn.Module], root_kwargs: Kwargs
    ) -> dict[nn.Module, Kwargs]:
        plan: dict[nn.Module, Kwargs] = self._policy._run_policy(
            root_module, self._ignored.modules, self._arguments
        )
        return plan


class _CorePolicy:
    """A policy as the core asks it; modules that stay in full precision are units of their own."""

    def __init__(
        self, root: nn.Module, policy: object, ignored: Ignored, full_precision: Sequence[type[nn.Module]],
        arguments: Kwargs,
    ) -> None:  # fmt: skip
        if hasattr(policy, "_run_policy"):
            policy = _Planned(policy, ignored, arguments)
        elif not callable(policy):
            raise ConfigurationError(
                f"auto_wrap_policy is {policy!r}; pass a policy of torch.distributed.fsdp.wrap, or a function "
                "(module, recurse, nonwrapped_numel) -> bool"
            )
        self._policy = adapt_policy(policy, root)
        self._ignored, self._full_precision = ignored, tuple(full_precision)
        self._closed: set[nn.Module] = set()  # not looked into, but for what stays in full precision

    def descend(self, module: nn.Module, numel: int, is_root: bool) -> bool:
        """See :class:`~shardkit.wrapping.policies.AdaptedPolicy`."""
        if module in self._ignored.modules:
            return False
        if module not in self._closed and self._policy.descend(module, numel, is_root):
            return True
        self._closed.update(module.modules())
        return bool(self._full_precision)

    def arguments(self, module: nn.Module, numel: int, is_root: bool) -> StateDict | None:
        """See :class:`~shardkit.wrapping.policies.AdaptedPolicy`."""
        if not is_root and isinstance(module, self._full_precision):
            _InFloat32(module)
            return {"mixed_precision": None}
        if is_root or module in self._closed:
            return None
        return self._policy.arguments(module, numel, is_root)


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
    own = [m for _, m in modules_outside_units(module)]
    if not any(p is not None and p.is_meta for m in own for p in m._parameters.values()):
        return
    if init is not None:
        init(module)
    else:
        _reset(module, torch.device("cpu"))


def materialize_each(
    module: nn.Module, init: Callable[[nn.Module], object] | None, device: torch.device, ignored: Ignored
) -> None:
    """The same module by module, as torch's FSDP does it; weights that were shared are shared afterwards, also with
    modules of which other units were made.

    Args:
        init: called with every module that is not in another unit, parents first; default: those with parameters or
            buffers are emptied onto ``device``, and their ``reset_parameters()`` is called.
        ignored: stays as it is; parameters that take the place of ignored ones are added.

    Raises:
        ConfigurationError: a module has no ``reset_parameters()``; one is still on the meta device after ``init``.
    """
    own = [m for _, m in modules_outside_units(module, without=ignored.modules)]
    listed = [(m, n, p) for m in own for n, p in m._parameters.items() if p is not None]
    before = [(m, n, _replaced.get(p, p)) for m, n, p in listed]
    others = [(m, n, p) for m, n, p in before if managing(p) is not None]  # of other units
    before = [(m, n, p) for m, n, p in before if managing(p) is None]
    if any(p.is_meta for _, _, p in before if p not in ignored.parameters):
        for m, name, p in others:  # what is to be initialized is no shard
            m._parameters[name] = nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device="meta"))
        _initialize(own, init, device)
        _put_back(before, ignored)
    for m, name, p in others:
        m._parameters[name] = p


def _initialize(
    modules: Iterable[nn.Module], init: Callable[[nn.Module], object] | None, device: torch.device
) -> None:
    for m in modules:
        if init is not None:
            init(m)
        elif any(True for _ in (*m.parameters(recurse=False), *m.buffers(recurse=False))):
            _reset(m, device, recurse=False)


def _put_back(before: Iterable[tuple[nn.Module, str, nn.Parameter]], ignored: Ignored) -> None:
    """Weights that were shared are shared again."""
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


def move_from_host(modules: Iterable[nn.Module], device: torch.device, kept: set[nn.Parameter]) -> None:
    """Parameters and buffers of these modules themselves that are on the CPU move to a device, in place."""
    for m in modules:
        for p in m._parameters.values():
            if p is not None and managing(p) is None and p.device.type == "cpu" and p not in kept:
                p.data = p.data.to(device)
        for name, buffer in m._buffers.items():
            if buffer is not None and buffer.device.type == "cpu":
                m._buffers[name] = buffer.to(device)


def broadcast_buffers(modules: Iterable[tuple[str, nn.Module]], groups: Sequence[Group]) -> None:
    """Buffers of these modules themselves become those of each group's first rank, in turn (collective).

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


def move_buffers(module: nn.Module, device: torch.device) -> None:
    """Buffers of a module and those below it move to a device, in place."""
    for m in module.modules():
        for name, buffer in m._buffers.items():
            if buffer is not None and buffer.device != device:
                m._buffers[name] = buffer.to(device)
