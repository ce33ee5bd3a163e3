"""Folders of torch's distributed checkpoints (DCP), written by whatever: shardkit, FSDP2, ``dcp.save``."""

from __future__ import annotations

import functools
import io
import os

import torch

from ...errors import DamagedFileError
from ...types import StateDict, Tree
from ..format.metadata import METADATA, Chunk, Record, TensorEntry, read_metadata
from .stored import Box, Place, StoredTensor
from .torch_files import Contents, held
from .trees import replaced


def read_folder(folder: str, trust_pickle: bool = False) -> StateDict:
    """What a folder holds, nested as it was saved.

    Args:
        trust_pickle: let torch run what objects in it say.

    Raises:
        UntrustedFileError, DamagedFileError: the table of contents, or an object, can't be read as data.
        ConfigurationError: records are compressed, or encrypted.
    """
    table, values = read_metadata(folder), {}
    for name in table.paths:
        if name in table.tensors:
            values[name] = _tensor(folder, name, table.tensors[name])
        else:
            values[name] = _object(folder, table.objects[name], trust_pickle)
    try:
        return table.nested(values)
    except ValueError as error:
        raise DamagedFileError(
            f"{os.path.join(folder, METADATA)} makes no sense ({error}); take another copy, or an earlier checkpoint"
        ) from None


def _tensor(folder: str, name: str, entry: TensorEntry) -> StoredTensor:
    parts = [
        Box(
            chunk.offsets, chunk.sizes, functools.cache(functools.partial(_place, folder, chunk, entry.dtype))
        )
        for chunk in entry.chunks
    ]
    return StoredTensor(name, tuple(entry.shape), entry.dtype, tuple(parts), entry.dtype)


def _place(folder: str, chunk: Chunk, dtype: torch.dtype) -> Place:
    """Finds the elements of a chunk: it is a file of ``torch.save`` within the file."""
    record, path = chunk.record, os.path.join(folder, chunk.record.file)
    record.check(folder)
    found = Contents(path, record.offset, record.length, f"tensor {record.name!r}").tree()
    if not isinstance(found, StoredTensor) or (found.shape, found.stored_dtype) != (chunk.sizes, dtype):
        raise DamagedFileError(
            f"{path}: tensor {record.name!r} is another one than the table of contents says; take an earlier "
            "checkpoint"
        )
    return found.parts[0].where()


def _object(folder: str, record: Record, trust_pickle: bool) -> Tree:
    record.check(folder)
    path = os.path.join(folder, record.file)
    if trust_pickle:
        with open(path, "rb") as file:
            file.seek(record.offset)
            value = torch.load(io.BytesIO(file.read(record.length)), map_location="cpu", weights_only=False)
            return replaced(value, held)
    return replaced(Contents(path, record.offset, record.length, repr(record.name)).values(), held)
