"""Writes torch's distributed checkpoints (DCP) tensor by tensor, with ``shardkit.json``."""

from __future__ import annotations

import io
import os
from typing import BinaryIO

import torch

from ...types import StateDict, Tree
from ..data_file import Written
from ..format.hashing import best_hash, new_hasher
from ..format.manifest import Item, Manifest, StoredFile
from .stored import BLOCK, StoredTensor
from .torch_writing import write_torch_file
from .trees import copied, leaves

_DATA = "__0_0.distcp"


def write_distributed(folder: str, tree: StateDict, step: int, run: str, world_size: int) -> None:
    """One data file, the table of contents, and checksums of all.

    Args:
        folder: empty.
        step, run, world_size: for ``shardkit.json``.
    """
    from ..composing import describe  # torch's part takes long to import

    records: list[Written] = []
    path = os.path.join(folder, _DATA)
    with open(path, "wb") as file:
        for keys, value in leaves(tree, tuples=False):
            start, shape, dtype = file.tell(), None, None
            if isinstance(value, StoredTensor):
                write_torch_file(file, value)
                shape, dtype = value.shape, str(value.dtype).removeprefix("torch.")
            else:
                _write_object(file, value)
            box = None if shape is None else ((0,) * len(shape), shape)
            length = file.tell() - start
            records.append(Written(_keys(tree, keys), dtype, shape, box, start, length, ""))
    kind = best_hash()
    files = {_DATA: hashed(path, records, kind)}
    manifest = Manifest(step=step, run=run, world_size=world_size, files=files, hash=kind)
    describe(folder, {_DATA: records}, manifest)


def _keys(tree: Tree, path: tuple[object, ...]) -> tuple[str | int, ...]:
    """Keys of dicts as text, as DCP has them; of lists as numbers."""
    keys: list[str | int] = []
    for key in path:
        keys.append(key if isinstance(tree, list) and isinstance(key, int) else str(key))
        tree = tree[key]
    return tuple(keys)


def _write_object(file: BinaryIO, value: Tree) -> None:
    """As DCP does: a file of torch.save. Tensors that are in it (in a tuple) are read."""
    buffer = io.BytesIO()
    torch.save(copied(value, lambda _, v: v.read() if isinstance(v, StoredTensor) else v), buffer)
    file.write(buffer.getbuffer())


def hashed(path: str, records: list[Written], kind: str) -> StoredFile:
    """Checksums of a file and of the records in it, which lie end to end."""
    whole = new_hasher(kind)
    items = []
    with open(path, "rb") as file:
        for record in records:
            own, left = new_hasher(kind), record.length
            while left:
                block = file.read(min(BLOCK, left))
                own.update(block)
                whole.update(block)
                left -= len(block)
            items.append(Item(record.name, record.offset, record.length, own.hexdigest()))
        while block := file.read(BLOCK):
            whole.update(block)
        return StoredFile(file.tell(), whole.hexdigest(), tuple(items))
