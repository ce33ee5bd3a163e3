"""Facts that existing code reads from torch's FullyShardedDataParallel, and torch's settings of state dicts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import nn
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

from shardkit.backend import Group
from shardkit.errors import ConfigurationError
from shardkit.flattening.flat_parameter import FLAT_PREFIX
from shardkit.fsdp.state import ShardingState, clean, plain_name
from shardkit.fsdp.wrapper import Door
from shardkit.nn.data_parallel.fsdp_facts import StandIn
from shardkit.torch_seams.dtensors import cut_rows, is_cut, mesh_over, whole
from shardkit.torch_seams.hooks import NO_BACKWARD
from shardkit.types import ProcessGroup, StateDict, Tree


class TorchFacts(StandIn):
    """A wrapper's state, under torch's names.

    Attributes:
        _settings: of state dicts.
        sharding_strategy, mixed_precision, cpu_offload: as they were passed, or torch's defaults.
    """

    _settings: StateDictSettings
    sharding_strategy: ShardingStrategy
    mixed_precision: MixedPrecision
    cpu_offload: CPUOffload
    backward_prefetch: BackwardPrefetch | None
    forward_prefetch: bool
    limit_all_gathers: bool

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[TorchFacts]:
        """Returns the FSDP modules at and below a module; with ``root_only`` those that are in no other one."""
        found = [m for m in module.modules() if isinstance(m, TorchFacts)]
        inner = {m for outer in found for m in outer.modules() if m is not outer} if root_only else set()
        return [m for m in found if m not in inner]

    @property
    def module(self) -> nn.Module:
        """The wrapped module."""
        return self._fsdp_wrapped_module._fpw_module

    @property
    def _ranks(self) -> Group:
        state = self._state
        return state.replicas if state.group.world_size == 1 and state.replicas is not None else state.group

    @property
    def rank(self) -> int:
        """This rank within its group."""
        return self._ranks.rank

    @property
    def world_size(self) -> int:
        """Size of the group."""
        return self._ranks.world_size

    @property
    def process_group(self) -> ProcessGroup:
        """The group to shard over, as it was passed, or as torch knows it."""
        passed = self._passed_group.value
        if isinstance(passed, tuple):
            return passed[0]
        if isinstance(passed, torch.distributed.device_mesh.DeviceMesh):
            return passed.get_group(passed.ndim - 1)
        return torch.distributed.group.WORLD if passed is None else passed

    @property
    def _use_orig_params(self) -> bool:
        return not self._state.options.flatten

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
    def named_parameters(self, *args: Tree, **kwargs: Tree) -> Iterator[tuple[str, nn.Parameter]]:
        """Names as torch's: what wrapping added is in them, but not inside of ``summon_full_params``."""
        for name, param in super().named_parameters(*args, **kwargs):
            yield self._named(name), param

    def named_buffers(self, *args: Tree, **kwargs: Tree) -> Iterator[tuple[str, torch.Tensor]]:
        """Names as torch's, as of parameters."""
        for name, buffer in super().named_buffers(*args, **kwargs):
            yield self._named(name), buffer

    def _named(self, name: str) -> str:
        if self._state.summoned is not None:
            return clean(name)
        *path, last = (part for part in name.split(".") if part != "_fpw_module")
        if last.startswith(FLAT_PREFIX) and self._state.options.flatten:
            number = last.removeprefix(FLAT_PREFIX)
            last = "_flat_param" if number == "0" else f"_flat_param_{number}"
        return ".".join([*path, last])

    def extra_repr(self) -> str:
        """Place and strategy."""
        return f"rank={self.rank}, world_size={self.world_size}, {self.sharding_strategy}"


# ------------------------------------------------------------ settings of state dicts
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
