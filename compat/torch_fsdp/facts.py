"""Facts that existing code reads from torch's FullyShardedDataParallel."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.fsdp._common_utils import TrainingState
from torch.distributed.fsdp.api import (
    BackwardPrefetch,
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
    StateDictSettings,
)

from shardkit.backend import Group
from shardkit.flattening.flat_parameter import FLAT_PREFIX
from shardkit.fsdp.state import clean
from shardkit.nn.data_parallel.fsdp_facts import StandIn
from shardkit.torch_seams.hooks import NO_BACKWARD
from shardkit.types import ProcessGroup, Tree


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
