"""Collects all that a checkpoint consists of, by path, and says what of it each rank writes; see [Note: copies]."""

from __future__ import annotations

import dataclasses
import io
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from ..backend import Backend, Group, backend_for, backend_of_job
from ..errors import ConfigurationError, UntrustedFileError
from ..fsdp.state_dict import Pieces
from ..layout import Box
from ..optimizer_state.kinds import Fixed, Leaf, Ranks, Slot, add_named, of_dtensor, whole
from ..torch_seams.tensors import is_dtensor
from ..types import ProcessGroup, StateDict
from .format.manifest import read_object
from .format.metadata import Path, dotted
from .model_state import ModelState
from .optimizers import CompositeHolder, Holder, ParameterNames, Schedulers, holder_of
from .rank_states import Stateful, random_states

LARGEST = 64 * 2**20  # bytes of a record: readers need that much memory, and ranks share what all have


class Entry(NamedTuple):
    """Something under a name in the state dict.

    Attributes:
        path: keys of the nested dicts and lists.
        value: as this rank has it.
    """

    path: Path
    value: Leaf | Fixed


class RecordPart(NamedTuple):
    """One record: a box of a tensor, or an object.

    Attributes:
        entry: which it is of.
        box: the part of a tensor; None for an object.
        data: the record of an object.
    """

    entry: Entry
    box: Box | None
    data: bytes = b""


# ------------------------------------------------------------ what there is
def of_extra(path: Path, value: object, ranks: Ranks) -> Iterator[Entry]:
    """Describes a user's own: dicts of tensors by name are stored tensor by tensor, all else as one record."""
    if isinstance(value, Pieces):
        # of a sharded_state_dict(), whose ranks have no replicas
        yield Entry(path, dataclasses.replace(value.leaf, copies=ranks.alone))
    elif is_dtensor(value):
        yield Entry(path, of_dtensor(dotted(path), value, ranks))
    elif isinstance(value, torch.Tensor):
        yield Entry(path, whole(dotted(path), value, (0,)))
    elif isinstance(value, Mapping) and _is_state_dict(value):
        for key, inner in value.items():
            yield from of_extra((*path, key), inner, ranks)
    else:
        yield Entry(path, Fixed(value))


def _is_state_dict(value: object) -> bool:
    """Says whether taking a dict apart and putting it together again gives the same: tensors by name, and notes."""
    if not isinstance(value, Mapping) or not all(isinstance(k, str) for k in value):
        return False
    inner = [
        v for k, v in value.items() if not (isinstance(v, str) and k.endswith(f" is {v}"))
    ]  # see noted()
    return bool(inner) and all(isinstance(v, torch.Tensor) or _is_state_dict(v) for v in inner)


# ------------------------------------------------------------ who writes what
def parts_of_rank(entries: Iterable[Entry], rank: int) -> list[RecordPart]:
    """Lists what this rank writes; see [Note: copies]. Objects become bytes here."""
    loads: dict[tuple[int, ...], list[int]] = {}
    mine: list[RecordPart] = []
    for entry in entries:
        copies = entry.value.copies
        if rank not in copies:
            continue
        load = loads.setdefault(copies, [0] * len(copies))
        for part, size in _parts_of(entry):
            turn = load.index(min(load))
            load[turn] += size + 1024  # what a record has beside its values
            if copies[turn] == rank:
                mine.append(part if part.box is not None else part._replace(data=_record_of(entry)))
    return mine


def _parts_of(entry: Entry) -> Iterator[tuple[RecordPart, int]]:
    if isinstance(entry.value, Fixed):
        yield RecordPart(entry, None), 1024
        return
    itemsize = entry.value.base.element_size()
    for box in entry.value.boxes:
        for small in cut(box, max(1, LARGEST // itemsize)):
            yield RecordPart(entry, small), small.numel * itemsize


def cut(box: Box, largest: int) -> Iterator[Box]:
    """Yields a box in order of its elements, in boxes of at most so many elements."""
    if box.numel <= largest:
        yield box
        return
    dim = next(k for k, size in enumerate(box.sizes) if size > 1)
    row = math.prod(box.sizes[dim + 1 :])
    rows = max(1, largest // row)
    for first in range(0, box.sizes[dim], rows):
        count = min(rows, box.sizes[dim] - first)
        offsets, sizes = list(box.offsets), list(box.sizes)
        offsets[dim], sizes[dim] = offsets[dim] + first, count
        yield from cut(Box(tuple(offsets), tuple(sizes), box.start + first * row), largest)


def _record_of(entry: Entry) -> bytes:
    value = entry.value.value if isinstance(entry.value, Fixed) else None
    made, name = io.BytesIO(), dotted(entry.path)
    try:
        torch.save(value, made)
    except Exception as error:  # a pickle fails with whatever an object raises
        raise ConfigurationError(
            f"{name!r} can't be saved ({type(error).__name__}: {error}): checkpoints hold data, that is tensors, "
            "numbers, strings and containers of them"
        ) from error
    try:
        read_object(name, made.getvalue())
    except UntrustedFileError as error:  # nobody could restore it
        raise ConfigurationError(
            f"{name!r} can't be saved, since it holds more than tensors, numbers, strings and containers of them: "
            f"{error.__cause__}. Pass its state_dict(), or what it consists of"
        ) from error
    return made.getvalue()


@dataclasses.dataclass(frozen=True)
class Parts:
    """The objects of a training, as :func:`shardkit.save_training` and :func:`shardkit.restore_training` take it."""

    model: nn.Module | None = None
    optimizer: Optimizer | Sequence[Optimizer] | None = None
    scheduler: Stateful | Sequence[Stateful] | None = None
    scaler: Stateful | None = None
    loader: Stateful | None = None
    ema: nn.Module | None = None

    @property
    def modules(self) -> dict[str, nn.Module]:
        """Lists modules by the name under which a checkpoint has them."""
        return {name: m for name, m in (("model", self.model), ("ema", self.ema)) if m is not None}

    @property
    def optimizers(self) -> list[Optimizer]:
        given = self.optimizer
        return list(given or ()) if given is None or isinstance(given, Sequence) else [given]

    @property
    def schedulers(self) -> Stateful | None:
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
    """Finds the backend of a model's device, and the ranks that take part: all, or those of a group."""
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
    """Says whether ranks are processes that torch.distributed knows."""
    dist = torch.distributed
    return dist.is_available() and dist.is_initialized()


def optimizer_entries(holder: Holder, slots: list[tuple[Slot, StateDict]]) -> Iterator[Entry]:
    """Yields state by the parameters' names, and groups; see ``docs/CHECKPOINTS.md`` for the format."""
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
    """Yields everything beside the model and the optimizer."""
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
    """The contents of a checkpoint.

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
    """Collects a training's objects as entries."""
    parts.check()
    modules = {name: ModelState(m, ranks) for name, m in parts.modules.items()}
    entries = [Entry((part, name), leaf) for part, m in modules.items() for name, leaf in m.leaves().items()]
    holder = holder_for(parts, modules.get("model"))
    slots = [] if holder is None else holder.states()
    if holder is not None:
        entries += optimizer_entries(holder, slots)
    entries += other_entries(parts, step, extra, backend, ranks)
    named: dict[str, Entry] = {}
    for entry in entries:
        add_named(named, {dotted(entry.path): entry})
    return Collected(entries, holder, slots)


def holder_for(parts: Parts, model: ModelState | None) -> Holder | None:
    """Finds the adapter of the optimizers, if there are any."""
    if not parts.optimizers or model is None:
        return None
    names = ParameterNames(model)
    holders = [holder_of(optimizer, names) for optimizer in parts.optimizers]
    return holders[0] if len(holders) == 1 else CompositeHolder(holders)
