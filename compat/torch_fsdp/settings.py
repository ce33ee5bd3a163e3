"""Which kind of state dict the units below a module make, and how; torch's settings, in its classes."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.fsdp.api import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)

from shardkit.errors import ConfigurationError
from shardkit.fsdp.state import ShardingState, plain_name
from shardkit.fsdp.wrapper import Door
from shardkit.torch_seams.dtensors import cut_rows, is_cut, mesh_over, whole
from shardkit.types import StateDict

from .facts import TorchFacts

_CONFIGS: dict[StateDictType, tuple[type[StateDictConfig], type[OptimStateDictConfig]]] = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.LOCAL_STATE_DICT: (LocalStateDictConfig, LocalOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
}


def checked(
    kind: StateDictType, config: StateDictConfig | None, optim_config: OptimStateDictConfig | None
) -> StateDictSettings:
    """Settings of a kind, with torch's defaults.

    Raises:
        ConfigurationError: a configuration is for another kind; the kind is LOCAL_STATE_DICT.
    """
    wanted = _CONFIGS[kind]
    config = wanted[0]() if config is None else config
    optim_config = wanted[1]() if optim_config is None else optim_config
    for given, type_ in zip((config, optim_config), wanted, strict=True):
        if type(given) is not type_:
            raise ConfigurationError(f"{kind} goes with a {type_.__name__}, not a {type(given).__name__}")
    if kind is StateDictType.LOCAL_STATE_DICT:
        raise ConfigurationError(
            "LOCAL_STATE_DICT is not made here. For a file of each rank's own use model.local_state_dict() and "
            "model.load_local_state_dict(); for a checkpoint that loads at other world sizes use SHARDED_STATE_DICT "
            "and torch.distributed.checkpoint"
        )
    return StateDictSettings(kind, config, optim_config)


def settings_of(units: Iterable[TorchFacts]) -> StateDictSettings | None:
    """Returns those that all units have; None where there are no units.

    Raises:
        ConfigurationError: units have different ones.
    """
    found: StateDictSettings | None = None
    for unit in units:
        if found is not None and unit._settings != found:
            raise ConfigurationError(
                f"FSDP modules have different settings for state dicts, {found} and {unit._settings}; call "
                "FSDP.set_state_dict_type with the outermost module"
            )
        found = unit._settings
    return found


def put(units: Iterable[TorchFacts], settings: StateDictSettings) -> None:
    """Gives all units these settings."""
    for unit in units:
        unit._settings = settings


# ------------------------------------------------------------ what becomes of a full state dict
def own_keys(state: ShardingState, prefix: str = "") -> set[str]:
    """Keys of a unit's own parameters in a full state dict."""
    names = [n for flat in state.flats for n in flat.names] + [other for _, other in state.shared_paths]
    return {prefix + plain_name(n) for n in names}


def settle(
    wrapper: Door, settings: StateDictSettings, found: StateDict, prefix: str, before: set[str], ranks: object
) -> None:
    """Makes of a unit's full entries what its settings say: none, some on the CPU, or DTensors.

    Args:
        found: the state dict.
        before: keys of others'.
        ranks: what :func:`~shardkit.torch_seams.dtensors.mesh_over` takes.
    """
    config, state = settings.state_dict_config, wrapper._state
    keys = [k for k in found if k.startswith(prefix) and k not in before]
    if isinstance(config, FullStateDictConfig) and config.rank0_only and not is_first(state):
        for key in keys:
            del found[key]
        return
    if settings.state_dict_type is StateDictType.SHARDED_STATE_DICT:
        if state.group.world_size == 1 and state.replicas is not None:
            raise ConfigurationError(
                "SHARDED_STATE_DICT of a module with NO_SHARD, where every rank has all: use FULL_STATE_DICT"
            )
        mesh = mesh_over(ranks, state.group.backend.device_type)
        own = own_keys(state, prefix)
        for key in keys:
            if key in own and isinstance(found[key], torch.Tensor) and not is_cut(found[key]):
                found[key] = cut_rows(found[key], mesh)
    if config.offload_to_cpu:
        for key in keys:
            if isinstance(found[key], torch.Tensor):
                found[key] = found[key].cpu()


def is_first(state: ShardingState) -> bool:
    """Whether this is the rank that keeps what only the first one keeps."""
    ranks = state.group if state.group.world_size > 1 or state.replicas is None else state.replicas
    return ranks.rank == 0


def gather_loaded(wrapper: nn.Module, state_dict: StateDict, prefix: str, *others: object) -> None:
    """A hook before loading: DTensors for a unit's own parameters become full tensors (collective)."""
    if not isinstance(wrapper, Door):
        return
    own = own_keys(wrapper._state)
    for key, value in list(state_dict.items()):
        if key.startswith(prefix) and is_cut(value) and plain_name(key[len(prefix) :]) in own:
            state_dict[key] = whole(value)
