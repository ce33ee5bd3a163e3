"""Translates arguments of torch's FullyShardedDataParallel to the core's."""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp.api import (
    BackwardPrefetch,
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
)

from shardkit.backend import Backend, backend_of_job
from shardkit.errors import ConfigurationError
from shardkit.fsdp import hybrid_groups
from shardkit.fsdp.state import Ignored
from shardkit.fsdp.wrapper import Door
from shardkit.policy import OffloadPolicy, PrecisionPolicy, ReducePolicy, ReshardPolicy
from shardkit.types import Kwargs, ProcessGroup

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
