"""Writes torch's distributed checkpoints (DCP) tensor by tensor, with ``shardkit.json``."""

from __future__ import annotations

import io
import os
import pickle
from typing import BinaryIO

import torch

from ..training_checkpoints.hashing import best_hash, new_hasher
from ..training_checkpoints.manifest import Item, Manifest, StoredFile, write_manifest
from ..types import StateDict, Tree
from .metadata import METADATA
from .stored import BLOCK, StoredTensor
from .torch_writing import write_torch_file
from .trees import copied, dotted, leaves

_DATA = "__0_0.distcp"


def write_distributed(folder: str, tree: StateDict, step: int, run: str, world_size: int) -> None:
    """One data file, the table of contents, and checksums of all.

    Args:
        folder: empty.
        step, run, world_size: for ``shardkit.json``.
    """
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        Metadata,
        MetadataIndex,
        StorageMeta,
    )

    facts: StateDict = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    paths: dict[str, tuple[object, ...]] = {}
    spans: list[tuple[str, int, int]] = []
    with open(os.path.join(folder, _DATA), "wb") as file:
        for path, value in leaves(tree, tuples=False):
            keys = tuple(
                key if isinstance(_at(tree, path[:k]), list) else str(key) for k, key in enumerate(path)
            )
            name, start = dotted(path), file.tell()
            paths[name] = keys
            if isinstance(value, StoredTensor):
                write_torch_file(file, value)
                facts[name] = _facts(value)
                index = MetadataIndex(name, torch.Size([0] * len(value.shape)), 0)
            else:
                _write_object(file, value)
                facts[name] = BytesStorageMetadata()
                index = MetadataIndex(name)
            places[index] = _StorageInfo(_DATA, start, file.tell() - start)
            spans.append((name, start, file.tell() - start))
    metadata = Metadata(facts, paths, places, StorageMeta())
    if "version" in Metadata.__dataclass_fields__:
        metadata.version = "1.0.0"
    with open(os.path.join(folder, METADATA), "wb") as file:
        pickle.dump(metadata, file)
    kind = best_hash()
    files = {
        _DATA: hashed(os.path.join(folder, _DATA), spans, kind),
        METADATA: hashed(os.path.join(folder, METADATA), [], kind),
    }
    write_manifest(folder, Manifest(step=step, run=run, world_size=world_size, files=files, hash=kind))


def _at(tree: Tree, path: tuple[object, ...]) -> object:
    for key in path:
        tree = tree[key]
    return tree


def _facts(tensor: StoredTensor) -> object:
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        TensorProperties,
        TensorStorageMetadata,
    )

    size = torch.Size(tensor.shape)
    chunk = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
    return TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), size, [chunk])


def _write_object(file: BinaryIO, value: Tree) -> None:
    """As DCP does: a file of torch.save. Tensors that are in it (in a tuple) are read."""
    buffer = io.BytesIO()
    torch.save(copied(value, lambda _, v: v.read() if isinstance(v, StoredTensor) else v), buffer)
    file.write(buffer.getbuffer())


def hashed(path: str, spans: list[tuple[str, int, int]], kind: str) -> StoredFile:
    """Checksums of a file and of the items in it, which lie end to end."""
    whole = new_hasher(kind)
    items = []
    with open(path, "rb") as file:
        for name, start, length in spans:
            own, left = new_hasher(kind), length
            while left:
                block = file.read(min(BLOCK, left))
                own.update(block)
                whole.update(block)
                left -= len(block)
            items.append(Item(name, start, length, own.hexdigest()))
        while block := file.read(BLOCK):
            whole.update(block)
        return StoredFile(file.tell(), whole.hexdigest(), tuple(items))
