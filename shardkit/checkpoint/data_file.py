"""One rank's data file, written record by record; and how one rank makes a checkpoint of all.

What a rank has written is in a small file beside (``index-RANK.json``). Ranks need not send each other anything:
whoever can read the checkpoint can read these. Of them one rank makes DCP's ``.metadata``, and ``shardkit.json``.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

import torch

from ..errors import ShardkitError
from ..launching.run_folder import write_at_once
from ..optimizer_state.kinds import Leaf
from .collecting import RecordPart
from .files.writing import GuardedFile, write_atomically
from .format.manifest import Hasher, Manifest, ManifestItem, StoredFile, hash_of, new_hasher, write_manifest
from .format.metadata import METADATA, dotted

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata


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
    text = pathlib.Path(folder, index_of(rank)).read_text()
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
