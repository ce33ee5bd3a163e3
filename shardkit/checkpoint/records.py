"""All that a checkpoint consists of, by path; what of it each rank writes, see [Note: copies]; and the files of ranks.

A rank's data file is written record by record. What it has written is in a small file beside (``index-RANK.json``).
Ranks need not send each other anything: whoever can read the checkpoint can read these. Of them one rank makes DCP's
``.metadata``, and ``shardkit.json``.
"""

from __future__ import annotations

import dataclasses
import io
import json
import math
import os
import pathlib
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..backend import Backend, Group, backend_for, backend_of_job
from ..errors import ConfigurationError, ShardkitError
from ..fsdp.state_dict import Pieces
from ..launching import write_at_once
from ..layout import Box
from ..optimizer_state.kinds import Fixed, Leaf, Ranks, Slot, of_dtensor, refuse_class, whole
from ..torch_seams.tensors import is_dtensor
from ..types import ProcessGroup, StateDict
from .files.writing import GuardedFile, write_atomically
from .format.contents import (
    METADATA,
    Hasher,
    Manifest,
    ManifestItem,
    Path,
    StoredFile,
    dotted,
    hash_of,
    new_hasher,
    refuse_what_is_no_data,
    write_manifest,
)
from .trained import (
    CompositeHolder,
    Holder,
    ModelState,
    ParameterNames,
    Schedulers,
    Stateful,
    holder_of,
    random_states,
)

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata


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
        yield Entry(path, Leaf(value.shape, value._run, tuple(value._boxes), ranks.alone))
    elif is_dtensor(value):
        yield Entry(path, of_dtensor(dotted(path), value, ranks))
    elif isinstance(value, torch.Tensor):
        if is_traceable_wrapper_subclass(value):
            refuse_class(dotted(path), value)
        yield Entry(path, whole(value, (0,)))
    elif isinstance(value, Mapping) and _is_state_dict(value):
        for key, inner in value.items():
            yield from of_extra((*path, key), inner, ranks)
    else:
        yield Entry(path, Fixed(value))


def _is_state_dict(value: object) -> bool:
    """Says whether taking a dict apart and putting it together again gives the same."""
    if not isinstance(value, Mapping) or not value or not all(isinstance(k, str) for k in value):
        return False
    return all(isinstance(v, torch.Tensor) or _is_state_dict(v) for v in value.values())


def check_names(entries: Iterable[Entry]) -> None:
    """Raises ConfigurationError where two entries have one name."""
    seen: dict[str, Path] = {}
    for entry in entries:
        name = dotted(entry.path)
        before = seen.setdefault(name, entry.path)
        if before != entry.path:
            raise ConfigurationError(f"{before} and {entry.path} are both called {name!r} in a checkpoint")


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
    data = made.getvalue()
    refuse_what_is_no_data(name, data)
    return data


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
        if given is None or isinstance(given, Sequence):
            return list(given or ())
        return [given]

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
    check_names(entries)
    return Collected(entries, holder, slots)


def holder_for(parts: Parts, model: ModelState | None) -> Holder | None:
    """Finds the adapter of the optimizers, if there are any."""
    if not parts.optimizers or model is None:
        return None
    names = ParameterNames(model)
    holders = [holder_of(optimizer, names) for optimizer in parts.optimizers]
    return holders[0] if len(holders) == 1 else CompositeHolder(holders)


# ------------------------------------------------------------ files of ranks; how one rank makes a checkpoint of all
PREFIX, ENDING = "__", "_0.distcp"


class Written(NamedTuple):
    """A record of a data file.

    Attributes:
        path: of the entry in the state dict.
        dtype, shape: of the whole tensor; None for an object.
        box: offsets and sizes of what is stored of it; None for an object.
        offset, length: in the file.
        hash: in hexadecimal digits.
    """

    path: Sequence[str | int]
    dtype: str | None
    shape: Sequence[int] | None
    box: Sequence[Sequence[int]] | None
    offset: int
    length: int
    hash: str


def name_of(rank: int) -> str:
    """Names a rank's data file as DCP does."""
    return f"{PREFIX}{rank}{ENDING}"


def index_of(rank: int) -> str:
    """Names the file that tells what a rank has written."""
    return f"index-{rank}.json"


class Hashed(GuardedFile):
    """A file that is written from the beginning to the end, with a checksum of each record."""

    def __init__(self, file: BinaryIO, kind: str) -> None:
        super().__init__(file)
        self._kind = kind
        self._record: Hasher = new_hasher(kind)
        self.size = 0

    def digest(self) -> str:
        """Returns the checksum of a record that is through; the next one begins."""
        record, self._record = self._record, new_hasher(self._kind)
        return record.hexdigest()

    def write(self, data: bytes | memoryview) -> int:
        view = memoryview(data).cast("B")
        super().write(view)
        self._record.update(view)
        self.size += len(view)
        return len(view)


def write_parts(
    folder: str, rank: int, parts: Sequence[RecordPart], kind: str, values: Iterable[torch.Tensor | None]
) -> None:
    """Writes a rank's data file and its index, synced; nothing but the index where it has nothing to write.

    Args:
        kind: of checksums.
        values: of each part its tensor on the host; None for objects.
    """
    records: list[Written] = []
    if parts:
        with open(os.path.join(folder, name_of(rank)), "xb") as file:
            hashed = Hashed(file, kind)
            for part, tensor in zip(parts, values, strict=True):
                records.append(_write(hashed, part, tensor))
            file.flush()
            os.fsync(file.fileno())
    text = json.dumps(records)
    # in one move: who sees the index sees all of it
    write_at_once(pathlib.Path(folder, index_of(rank)), text + hash_of(text.encode(), "sha256"))


def _write(hashed: Hashed, part: RecordPart, tensor: torch.Tensor | None) -> Written:
    start = hashed.size
    leaf = part.entry.value
    if tensor is None or part.box is None or not isinstance(leaf, Leaf):
        hashed.write(part.data)
        hashed.check()
        dtype = shape = box = None
    else:
        values = tensor.detach()
        if values.untyped_storage().size() != values.numel() * values.element_size():
            values = values.clone(memory_format=torch.contiguous_format)  # torch.save writes all of a storage
        hashed.save(values)
        dtype, shape = str(leaf.base.dtype).removeprefix("torch."), tuple(leaf.shape)
        box = (part.box.offsets, part.box.sizes)
    return Written(part.entry.path, dtype, shape, box, start, hashed.size - start, hashed.digest())


def read_index(folder: str, rank: int) -> list[Written]:
    """Reads what a rank has written."""
    with open(os.path.join(folder, index_of(rank))) as file:
        text = file.read()
    text, digest = text[:-64], text[-64:]
    if hash_of(text.encode(), "sha256") != digest:
        raise ValueError(f"{index_of(rank)} has other bytes than were written")
    return [Written(*values) for values in json.loads(text)]


def on_host(parts: Sequence[RecordPart], copied: bool = False) -> Iterator[torch.Tensor | None]:
    """Yields each part's values on the host; None for objects.

    What is on a device is copied as it lies together, so that copies are few.

    Args:
        copied: of what is on the host already a copy.
    """
    seen: tuple[torch.Tensor, torch.Tensor] | None = None
    for part in parts:
        leaf = part.entry.value
        if not isinstance(leaf, Leaf) or part.box is None:
            yield None
        elif leaf.base.device.type == "cpu":
            values = leaf.values(part.box)
            yield values.clone() if copied else values
        else:
            if seen is None or seen[0] is not leaf.base:
                seen = (leaf.base, leaf.base.cpu())
            yield Leaf(leaf.shape, seen[1], leaf.boxes, leaf.copies).values(part.box)


class IncompleteError(ShardkitError):
    """Ranks have written too much of something, or too little: layouts were not what they said."""


def compose(folder: str, world_size: int, step: int, run: str, kind: str) -> None:
    """Writes what a folder of data files lacks to be a checkpoint, and removes the ranks' indices.

    Args:
        kind: of checksums.
    """
    records = {name_of(rank): read_index(folder, rank) for rank in range(world_size)}
    for rank in range(world_size):
        os.unlink(os.path.join(folder, index_of(rank)))
    files = {}
    for name, written in records.items():
        items = tuple(ManifestItem(dotted(r.path), r.offset, r.length, r.hash) for r in written)
        if items:
            files[name] = StoredFile(items[-1].offset + items[-1].length, "", items)
    describe(folder, records, Manifest(step=step, run=run, world_size=world_size, files=files, hash=kind))


def describe(folder: str, records: Mapping[str, Sequence[Written]], manifest: Manifest) -> None:
    """Writes ``.metadata``, then ``shardkit.json``, which makes data files a checkpoint."""
    metadata = pickle.dumps(metadata_of(records))
    with write_atomically(os.path.join(folder, METADATA)) as file:
        file.write(metadata)
    stored = StoredFile(len(metadata), hash_of(metadata, manifest.hash))
    write_manifest(folder, dataclasses.replace(manifest, files={**manifest.files, METADATA: stored}))


def metadata_of(records: Mapping[str, Sequence[Written]]) -> Metadata:
    """Makes DCP's table of contents of the records in each file."""
    # torch's part takes long to import
    from torch.distributed.checkpoint import filesystem, metadata

    tensors: dict[str, metadata.TensorStorageMetadata] = {}
    state: dict[str, metadata.TensorStorageMetadata | metadata.BytesStorageMetadata] = {}
    places: dict[metadata.MetadataIndex, object] = {}
    paths: dict[str, tuple[str | int, ...]] = {}
    for file, written in records.items():
        for record in written:
            name = dotted(record.path)
            paths[name] = tuple(record.path)
            index = metadata.MetadataIndex(name, None if record.box is None else record.box[0])
            if record.box is None:
                state[name] = metadata.BytesStorageMetadata()
            else:
                dtype, shape = getattr(torch, record.dtype or ""), torch.Size(record.shape or ())
                made = metadata.TensorStorageMetadata(metadata.TensorProperties(dtype=dtype), shape, [])
                found = tensors[name] = tensors.get(name, made)
                is_same = (found.size, found.properties.dtype) == (shape, dtype)
                if state.setdefault(name, found) is not found or not is_same:
                    raise IncompleteError(
                        f"{name!r} has shape {tuple(shape)} and {dtype} on one rank, and something else on "
                        "others"
                    )
                offsets, sizes = map(torch.Size, record.box)
                found.chunks.append(metadata.ChunkStorageMetadata(offsets, sizes))
            if index in places:
                raise IncompleteError(f"{name!r} was written twice, by {file} too")
            places[index] = filesystem._StorageInfo(file, record.offset, record.length)
    for name, stored in tensors.items():
        stored.chunks.sort(key=lambda chunk: tuple(chunk.offsets))
        there, expected = sum(math.prod(c.sizes) for c in stored.chunks), stored.size.numel()
        if there != expected:
            raise IncompleteError(
                f"{name!r} has {expected} elements, and ranks have written {there} of them. Call save with the same "
                "model and optimizer on all ranks"
            )
    meta, version = metadata.StorageMeta(), filesystem.CURRENT_DCP_VERSION
    return metadata.Metadata(state, paths, places, meta, version)
