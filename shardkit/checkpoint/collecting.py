"""What a checkpoint is made of, as this rank has it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from ..backend import Backend, Group, backend_for, backend_of_job
from ..errors import ConfigurationError
from ..types import ProcessGroup, StateDict
from .entries import Entry, check_names, of_extra
from .holders import holder_of
from .leaves import Fixed, Ranks
from .model_state import ModelState
from .optimizer_state import Holder, Names
from .rank_states import Stateful, random_states
from .slots import Slot
from .together import Schedulers, Together


@dataclasses.dataclass(frozen=True)
class Parts:
    """What a training consists of, as :func:`shardkit.save_training` and :func:`shardkit.restore_training` take it."""

    model: nn.Module | None = None
    optimizer: Optimizer | Sequence[Optimizer] | None = None
    scheduler: Stateful | Sequence[Stateful] | None = None
    scaler: Stateful | None = None
    loader: Stateful | None = None
    ema: nn.Module | None = None

    @property
    def modules(self) -> dict[str, nn.Module]:
        """Modules by the name under which a checkpoint has them."""
        return {name: m for name, m in (("model", self.model), ("ema", self.ema)) if m is not None}

    @property
    def optimizers(self) -> list[Optimizer]:
        """One or several."""
        given = self.optimizer
        if given is None or isinstance(given, Sequence):
            return list(given or ())
        return [given]

    @property
    def schedulers(self) -> Stateful | None:
        """All of them as one."""
        given = self.scheduler
        return Schedulers(given) if isinstance(given, Sequence) else given

    def check(self) -> None:
        """Raises ConfigurationError for what is no such thing."""
        for name, module in self.modules.items():
            if not isinstance(module, nn.Module):
                raise ConfigurationError(f"{name} is a {type(module).__name__}, expected a torch module")
        if self.optimizers and self.model is None:
            raise ConfigurationError(
                "optimizer= needs model= too: checkpoints keep optimizer state by the model's names"
            )
        one = [("scheduler", self.scheduler), ("scaler", self.scaler), ("loader", self.loader)]
        given = [pair for pair in one if pair[1] is not None]
        if isinstance(self.scheduler, Sequence):
            given[:1] = [("scheduler", s) for s in self.scheduler]
        for name, value in given:
            if not (hasattr(value, "state_dict") and hasattr(value, "load_state_dict")):
                raise ConfigurationError(
                    f"{name} is a {type(value).__name__} without state_dict() and load_state_dict()"
                )


def backend_and_ranks(model: nn.Module | None, group: ProcessGroup) -> tuple[Backend, Ranks]:
    """Of a model's device, and who takes part: all ranks, or those of a group; one process alone has no group."""
    tensors = [] if model is None else [p for p in model.parameters() if not p.is_meta]
    backend = backend_for(tensors) if tensors else backend_of_job()
    try:
        found: Group = backend.group(group)
    except ConfigurationError:
        if group is not None or has_torchs_ranks():
            raise
        return backend, Ranks.of(None)
    return backend, Ranks.of(found)


def has_torchs_ranks() -> bool:
    """Whether ranks are processes that torch.distributed knows."""
    dist = torch.distributed
    return dist.is_available() and dist.is_initialized()


def module_entries(part: str, module: ModelState) -> Iterator[Entry]:
    """Parameters and buffers."""
    for name, value in module.leaves().items():
        yield Entry((part, name), value)


def optimizer_entries(holder: Holder, slots: list[tuple[Slot, StateDict]]) -> Iterator[Entry]:
    """State by the parameters' names, and groups; see ``docs/CHECKPOINTS.md`` for the format."""
    for slot, state in slots:
        for name, values in slot.leaves(state, holder.names.ranks).items():
            for key, value in values.items():
                yield Entry(("optimizer", "state", name, key), value)
    for name, named in holder.named().items():
        yield Entry(("optimizer", "state", name), Fixed(named))
    for k, group in enumerate(holder.groups()):
        writers = holder.writers_of(k)
        for key, value in group.items():
            yield Entry(("optimizer", "param_groups", k, key), Fixed(value, writers))
    for key, value in holder.others().items():
        yield Entry(("optimizer", key), Fixed(value))


def other_entries(
    parts: Parts, step: int, extra: Mapping[str, object] | None, backend: Backend, ranks: Ranks
) -> Iterator[Entry]:
    """Everything beside the model and the optimizer."""
    yield Entry(("step",), Fixed(step))
    for name, value in (("scheduler", parts.schedulers), ("scaler", parts.scaler)):
        if value is not None:
            yield Entry((name,), Fixed(value.state_dict()))
    for key, inner in (extra or {}).items():
        yield from of_extra(("extra", key), inner, ranks)
    own = str(ranks.rank)
    yield Entry(("rank_states", own, "random"), Fixed(random_states(backend), ranks.alone))
    if parts.loader is not None:
        yield Entry(("rank_states", own, "loader"), Fixed(parts.loader.state_dict(), ranks.alone))


@dataclasses.dataclass(frozen=True)
class Collected:
    """What a checkpoint consists of.

    Attributes:
        entries: as this rank has them.
        holder: the optimizer, if there is one.
        slots: of the optimizer, with their state.
    """

    entries: list[Entry]
    holder: Holder | None
    slots: list[tuple[Slot, StateDict]]


def collect(
    parts: Parts, step: int, extra: Mapping[str, object] | None, backend: Backend, ranks: Ranks
) -> Collected:
    """All of it.

    Raises:
        ConfigurationError: something can't be kept in a checkpoint.
    """
    parts.check()
    entries: list[Entry] = []
    holder, slots = None, []
    modules = {name: ModelState(m, ranks) for name, m in parts.modules.items()}
    for name, module in modules.items():
        entries += module_entries(name, module)
    holder = holder_for(parts, modules.get("model"))
    if holder is not None:
        slots = holder.states()
        entries += optimizer_entries(holder, slots)
    entries += other_entries(parts, step, extra, backend, ranks)
    check_names(entries)
    return Collected(entries, holder, slots)


def holder_for(parts: Parts, model: ModelState | None) -> Holder | None:
    """The optimizer, if there is one."""
    if not parts.optimizers or model is None:
        return None
    names = Names(model)
    holders = [holder_of(optimizer, names) for optimizer in parts.optimizers]
    return holders[0] if len(holders) == 1 else Together(holders)
