"""Attributes that existing code reads from fairscale's FullyShardedDataParallel, private names included."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable

import torch
from torch import nn

from shardkit.errors import ConfigurationError, LifecycleError
from shardkit.fsdp.construct import reconnect
from shardkit.fsdp.flat_param import FlatParam
from shardkit.fsdp.originals import managing
from shardkit.fsdp.store import FULL
from shardkit.fsdp.submodule_api import Answer, is_collecting
from shardkit.fsdp.wrapper import Door
from shardkit.optimizers.shards import shard_behind
from shardkit.torch_seams.hooks import NO_BACKWARD
from shardkit.types import Memo, ProcessGroup, StateDict, Tree


class TrainingState(enum.Enum):
    IDLE = enum.auto()
    FORWARD = enum.auto()
    BACKWARD_PRE = enum.auto()
    BACKWARD_POST = enum.auto()
    SUMMON_FULL_PARAMS = enum.auto()


class PassedGroup:
    """Holds what was passed as a process group: copies of a module have the same, pickled ones have none.

    Called with the output and this rank's shard of an all-gather, it tells a ProcessGroupTracker.
    """

    def __init__(self, value: ProcessGroup = None) -> None:
        self.value = value
        self._tell: Callable[[torch.Tensor, torch.Tensor], None] | None = getattr(
            value, "hear_of_gathering", None
        )

    def hear(self, flats: Iterable[FlatParam]) -> None:
        """Is told of what these gather, if there is a tracker to tell."""
        if self._tell is not None:
            for flat in flats:
                flat.on_gather = self

    def __call__(self, output: torch.Tensor, shard: torch.Tensor) -> None:
        if self._tell is not None:
            self._tell(output, shard)

    def __deepcopy__(self, memo: Memo) -> PassedGroup:
        return self

    def __reduce__(self) -> tuple[type[PassedGroup], tuple[()]]:
        return PassedGroup, ()


class InnerStateDict(Answer):
    """``state_dict`` of ``fsdp.module``: with one rank the full one, unflattened this rank's shards; else refused."""

    def __call__(self, *args: Tree, **kwargs: Tree) -> StateDict:
        door: Tree = self.module
        if is_collecting() or (door.world_size > 1 and door.flatten_parameters):
            return nn.Module.state_dict(door.module, *args, **kwargs)
        return (door.state_dict if door.world_size == 1 else door.local_state_dict)(*args, **kwargs)


class StandIn(Door):
    """A wrapper that stands for fairscale's or torch's: its state, as far as both have it under the same names."""

    _passed_group: PassedGroup
    training_state: enum.Enum

    @property
    def _is_root(self) -> bool | None:
        return self._state.is_root

    @property
    def compute_device(self) -> torch.device:
        """The device on which parameters are gathered."""
        return self._state.compute_device

    def assert_state(self, state: enum.Enum | list[enum.Enum]) -> None:
        """Raises unless the module is in one of these states.

        Raises:
            LifecycleError: it is in another one.
        """
        wanted = [state] if isinstance(state, enum.Enum) else state
        if self.training_state not in wanted:
            raise LifecycleError(
                f"expected to be in states {wanted} but current state is {self.training_state}"
            )


class FairscaleFacts(StandIn):
    """A wrapper's state, under fairscale's names.

    Attributes:
        _passed_group, _passed_for_gradients: process groups, as they were passed.
        flatten_parameters, move_params_to_cpu: as they were passed.
    """

    _passed_for_gradients: PassedGroup
    flatten_parameters: bool
    move_params_to_cpu: bool

    @property
    def module(self) -> nn.Module:
        """The wrapper's inner part, which forwards to the wrapped module."""
        return self._fsdp_wrapped_module

    @property
    def params(self) -> list[nn.Parameter]:
        """This wrapper's own listed parameters (shards)."""
        return [listing.param for listing in self._state.listings]

    @property
    def cpu_offload(self) -> bool:
        return self.move_params_to_cpu

    @property
    def rank(self) -> int:
        return self._state.group.rank

    @property
    def world_size(self) -> int:
        return self._state.group.world_size

    @property
    def process_group(self) -> ProcessGroup:
        """The group as it was passed, or as torch knows it."""
        if self._passed_group.value is not None:
            return self._passed_group.value
        return getattr(self._state.group, "process_group", None) or torch.distributed.group.WORLD

    @process_group.setter
    def process_group(self, group: ProcessGroup) -> None:
        """Set after unpickling, from the outermost module on; until then the group is that of all ranks.

        Raises:
            ConfigurationError: the shards are of another number of ranks, or of another rank.
            LifecycleError: the module's forward or backward is under way, or the root has run.
        """
        self.assert_state(TrainingState.IDLE)
        reconnect(self._state, getattr(group, "group", group))
        self._passed_group = PassedGroup(group)
        self._passed_group.hear(self._state.flats)

    @property
    def process_group_reduce_scatter(self) -> ProcessGroup:
        """Returns what was passed, if that is a group of as many ranks; gradients have their own connections anyway."""
        passed: Tree = self._passed_for_gradients.value
        fits = callable(getattr(passed, "size", None)) and passed.size() == self.world_size
        return passed if fits else self.process_group

    @property
    def compute_dtype(self) -> torch.dtype:
        chosen, flats = self._state.options.precision.compute, self._state.flats
        return chosen or (flats[0].param.dtype if flats else torch.float32)

    @property
    def buffer_dtype(self) -> torch.dtype:
        return self._state.options.precision.buffers or self.compute_dtype

    @property
    def numel_padded_per_param(self) -> list[int]:
        """Padding at the end of each of this rank's shards."""
        return [listing.layout.padding(self.rank) for listing in self._state.listings]

    @property
    def has_full_params(self) -> bool:
        """Whether this wrapper's parameters are gathered."""
        return self._state.summoned is not None or any(f.store.state in FULL for f in self._state.flats)

    @property
    def training_state(self) -> TrainingState:  # type: ignore[override]
        """Tells what the module is doing."""
        if self._state.summoned is not None:
            return TrainingState.SUMMON_FULL_PARAMS
        engine = self._state.engine
        if engine is not None and engine.state.task != NO_BACKWARD:
            return TrainingState.BACKWARD_PRE
        if engine is not None and engine.forwards:
            return TrainingState.FORWARD
        return TrainingState.IDLE

    @property
    def _require_backward_grad_sync(self) -> bool:
        engine = self._state.engine
        return engine is None or not engine.state.accumulating

    @property
    def uncollected_opt_state(self) -> dict[int, StateDict]:
        """State of parameters that are this rank's alone, as of the last ``gather_full_optim_state_dict``."""
        return self._state.uncollected

    @property
    def _streams(self) -> dict[str, object]:
        """None: collectives have streams of their own."""
        return {}

    @property
    def _reducer(self) -> None:
        """None: a unit's gradients are reduced together, without buckets."""

    @property
    def _num_flatten_params(self) -> int:
        return len(self._state.flats) if self.flatten_parameters else 0

    def non_shared_params(self) -> list[nn.Parameter]:
        """Returns this wrapper's own parameters; those of other wrappers that it uses are theirs."""
        return self.params

    def append_shared_param(self, p: nn.Parameter) -> None:
        """Accepted: weights that wrappers share are found when they are wrapped.

        Raises:
            ConfigurationError: ``p`` belongs to no FSDP module.
        """
        if shard_behind(p) is None and managing(p) is None:
            raise ConfigurationError("append_shared_param takes a parameter that another FSDP module owns")

    def _reset_lazy_init(self) -> None:
        """The next forward finds out anew which modules are below this one; its units keep what they have.

        Raises:
            LifecycleError: its forward or backward is under way.
        """
        self.assert_state(TrainingState.IDLE)
        self._state.forget_root()


# ------------------------------------------------------------ optimizer state
def check_param_counts_before_sharding(full_optim_state_dict: StateDict, n_instances: int) -> None:
    """Checks that a full optimizer state was saved from as many FSDP instances.

    Raises:
        ConfigurationError: it was not.
    """
    saved = len(set(full_optim_state_dict["param_id_map"].values()))
    if full_optim_state_dict["state"] and saved != n_instances:
        raise ConfigurationError(
            f"the optimizer state was saved from {saved} FSDP instances, this model has {n_instances} (itself "
            "included); wrap it as it was when the state was saved"
        )


def is_singleton_tensor(x: object) -> bool:
    """Whether it is a tensor without dimensions."""
    return isinstance(x, torch.Tensor) and x.dim() == 0
