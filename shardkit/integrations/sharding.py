"""Common parts of the doors: which parts of a model become units, and state as one process has it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from ..errors import ConfigurationError
from ..fsdp import fully_shard
from ..fsdp.state import state_of
from ..fsdp.state_dict import follow_shards, gather_plain, shard_plain
from ..optimizers.shards import shard_behind
from ..oss.optimizer import OSS
from ..oss.sharded_ddp import ShardedDDP
from ..policy import OffloadPolicy, PrecisionPolicy, ReducePolicy, ReshardPolicy
from ..training.whole_parameters import WholeParameters
from ..types import Kwargs, ProcessGroup, StateDict

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Units = Sequence["type[nn.Module] | str"] | Callable[[nn.Module], bool]


@dataclass(frozen=True)
class Sharding:
    """Says how a framework's door shards a model that is not sharded yet.

    Attributes:
        units: classes of modules, or their names, that are gathered together; or a function that tells of a module
            whether it is one. None: what the model calls its ``_no_split_modules`` (transformers), else the members of
            each outermost ``ModuleList``.
        precision, reshard, offload, reduce, group, replicas, mesh: as of :func:`~shardkit.fully_shard`.
    """

    units: Units | None = None
    precision: PrecisionPolicy | None = None
    reshard: ReshardPolicy | None = None
    offload: OffloadPolicy | None = None
    reduce: ReducePolicy | None = None
    group: ProcessGroup = None
    replicas: ProcessGroup = None
    mesh: DeviceMesh | None = None

    def shard(self, model: nn.Module) -> None:
        """Shards a model in place; of one that is in part sharded already the rest. One process alone shards nothing.

        Raises:
            ConfigurationError: ``units`` names what the model has not; else as :func:`~shardkit.fully_shard`.
        """
        if not dist.is_available() or not dist.is_initialized():
            return
        if isinstance(model, ShardedDDP) or state_of(model) is not None:
            return
        is_new = not is_sharded(model)
        if not is_new and not any(p.requires_grad and shard_behind(p) is None for p in model.parameters()):
            return
        options: Kwargs = {name: value for name, value in vars(self).items() if name != "units"}
        options["dtensors"] = False  # what holds optimizer state as one process has it takes rows
        for module in reversed(self.units_of(model) if is_new else []):  # those inside of others first
            if module is not model:
                fully_shard(module, **options)
        fully_shard(model, **options)

    def units_of(self, model: nn.Module) -> list[nn.Module]:
        """Returns the parts of a model that become units, in the order of ``modules()``.

        Raises:
            ConfigurationError: none is of a class that ``units`` names.
        """
        if callable(self.units):
            return [m for m in model.modules() if self.units(m)]
        unsplit = {name for m in model.modules() for name in getattr(m, "_no_split_modules", None) or ()}
        named: list[type[nn.Module] | str] = list(sorted(unsplit) if self.units is None else self.units)
        if not named:
            return [] if self.units is not None else list(_layers(model))
        found = [m for m in model.modules() if type(m) in named or type(m).__name__ in named]
        if not found and self.units is not None:
            names = ", ".join(n if isinstance(n, str) else n.__name__ for n in named)
            there = sorted({type(m).__name__ for m in model.modules()})
            raise ConfigurationError(
                f"units={names}: the model has no such modules. It has {', '.join(there[:20])}"
            )
        return found


def _layers(model: nn.Module) -> Iterable[nn.Module]:
    for child in model.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        else:
            yield from _layers(child)


def is_sharded(model: nn.Module) -> bool:
    """Says whether a module, or a part of it, is sharded: its parameters, or what belongs to them (ShardedDDP)."""
    return isinstance(model, ShardedDDP) or any(state_of(m) is not None for m in model.modules())


# ------------------------------------------------------------ optimizers
def follow(optimizer: Optimizer) -> None:
    """Leads an optimizer that was made before its model was sharded to the shards; see :func:`follow_shards`."""
    if not isinstance(optimizer, OSS | WholeParameters):
        follow_shards(optimizer)


def whole_state(optimizer: Optimizer, keep_on: bool) -> StateDict:
    """Returns an optimizer's state as one process has it (collective); empty where it is not to be kept.

    Raises:
        ConfigurationError: see :func:`gather_plain`.
    """
    if isinstance(optimizer, OSS):
        optimizer.consolidate_state_dict(0)
        return optimizer.state_dict() if optimizer.rank == 0 and keep_on else {}
    if isinstance(optimizer, WholeParameters):
        state = optimizer.state_dict(0)
        return state if keep_on else {}
    return gather_plain(optimizer, keep_on) or {}


def load_whole_state(optimizer: Optimizer, state: StateDict) -> None:
    """Loads what :func:`whole_state`, or one process, has saved; each rank keeps its part.

    Raises:
        ConfigurationError: it is of another model.
    """
    takes_whole = isinstance(optimizer, OSS | WholeParameters)
    optimizer.load_state_dict(state if takes_whole else shard_plain(optimizer, state))
