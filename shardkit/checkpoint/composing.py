"""One rank makes a checkpoint of what all ranks have written: DCP's ``.metadata``, and ``shardkit.json``."""

from __future__ import annotations

import dataclasses
import math
import os
import pickle
from collections.abc import Mapping, Sequence

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from ..errors import ShardkitError
from .data_file import Index, Written, index_of, name_of, read_index
from .files.writing import write_atomically
from .format.manifest import Manifest, ManifestItem, StoredFile, hash_of, write_manifest
from .format.metadata import METADATA


class IncompleteError(ShardkitError):
    """Ranks have written too much of something, or too little: layouts were not what they said."""


def compose(folder: str, world_size: int, step: int, run: str, kind: str) -> None:
    """Writes what a folder of data files lacks to be a checkpoint, and removes the ranks' indices.

    Args:
        kind: of checksums.

    Raises:
        IncompleteError: a tensor is there in part, or twice.
        OSError: the disk is full, or a rank's file can't be read.
    """
    indices = [read_index(folder, rank) for rank in range(world_size)]
    for rank in range(world_size):
        os.unlink(os.path.join(folder, index_of(rank)))
    records = {name_of(rank): index.records for rank, index in enumerate(indices)}
    files = {name_of(rank): _stored(index) for rank, index in enumerate(indices) if index.records}
    describe(folder, records, Manifest(step=step, run=run, world_size=world_size, files=files, hash=kind))


def describe(folder: str, records: Mapping[str, Sequence[Written]], manifest: Manifest) -> None:
    """Writes ``.metadata``, then ``shardkit.json``, which makes data files a checkpoint.

    Args:
        records: of each data file.
        manifest: of the data files.

    Raises:
        IncompleteError, OSError: see :func:`compose`.
    """
    metadata = pickle.dumps(metadata_of(records))
    with write_atomically(os.path.join(folder, METADATA)) as file:
        file.write(metadata)
    stored = StoredFile(len(metadata), hash_of(metadata, manifest.hash))
    write_manifest(folder, dataclasses.replace(manifest, files={**manifest.files, METADATA: stored}))


def _stored(index: Index) -> StoredFile:
    items = tuple(ManifestItem(r.name, r.offset, r.length, r.hash) for r in index.records)
    return StoredFile(index.bytes, index.hash, items)


def metadata_of(records: Mapping[str, Sequence[Written]]) -> Metadata:
    """Makes DCP's table of contents of the records in each file.

    Raises:
        IncompleteError: see :func:`compose`.
    """
    state: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    places: dict[MetadataIndex, object] = {}
    paths: dict[str, tuple[str | int, ...]] = {}
    for file, written in records.items():
        for record in written:
            paths[record.name] = record.path
            where = filesystem._StorageInfo(file, record.offset, record.length)
            if record.box is None:
                index = MetadataIndex(record.name)
                state[record.name] = BytesStorageMetadata()
            else:
                index = MetadataIndex(record.name, record.box[0])
                _tensor(state, record).chunks.append(
                    ChunkStorageMetadata(torch.Size(record.box[0]), torch.Size(record.box[1]))
                )
            if index in places:
                raise IncompleteError(f"{record.name!r} was written twice, by {file} too")
            places[index] = where
    _check(state)
    made = Metadata(state, planner_data=paths, storage_data=places, storage_meta=StorageMeta())
    if hasattr(made, "version"):
        made.version = getattr(filesystem, "CURRENT_DCP_VERSION", None)
    return made


def _tensor(
    state: dict[str, TensorStorageMetadata | BytesStorageMetadata], record: Written
) -> TensorStorageMetadata:
    dtype, shape = getattr(torch, record.dtype or ""), torch.Size(record.shape or ())
    found = state.setdefault(record.name, TensorStorageMetadata(TensorProperties(dtype=dtype), shape, []))
    if not isinstance(found, TensorStorageMetadata) or found.size != shape or found.properties.dtype != dtype:
        raise IncompleteError(
            f"{record.name!r} has shape {tuple(shape)} and {dtype} on one rank, and something else on others"
        )
    return found


def _check(state: Mapping[str, TensorStorageMetadata | BytesStorageMetadata]) -> None:
    for name, stored in state.items():
        if isinstance(stored, TensorStorageMetadata):
            stored.chunks.sort(key=lambda chunk: tuple(chunk.offsets))
            there, expected = sum(math.prod(c.sizes) for c in stored.chunks), stored.size.numel()
            if there != expected:
                raise IncompleteError(
                    f"{name!r} has {expected} elements, and ranks have written {there} of them. Call save "
                    "with the same model and optimizer on all ranks"
                )
