"""A checkpoint on the disk, whose records are compared with ``shardkit.json`` and read as data."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable

import torch

from ...errors import ConfigurationError, DamagedFileError, UntrustedFileError
from ...types import Tree
from ..files.loading import load_data
from .manifest import Manifest, hash_of, read_manifest, refuse_damage
from .metadata import METADATA, Path, Record, read_metadata


def read_object(name: str, data: bytes) -> Tree:
    """Reads a record of an object, to the CPU."""
    return load_data(io.BytesIO(data), len(data), name)


def read_tensor(name: str, data: bytes, sizes: tuple[int, ...]) -> torch.Tensor:
    """Reads a record of a tensor of these sizes, to the CPU."""
    found = read_object(name, data)
    if not isinstance(found, torch.Tensor) or tuple(found.shape) != sizes:
        raise DamagedFileError(
            f"{name} is no tensor of sizes {sizes}, which the checkpoint should have there"
        )
    return found.detach()


def refuse_what_is_no_data(name: str, data: bytes) -> None:
    """Raises for a record that could not be read again."""
    try:
        read_object(name, data)
    except UntrustedFileError as error:
        raise ConfigurationError(
            f"{name!r} can't be saved, since it holds more than tensors, numbers, strings and containers of them: "
            f"{error.__cause__}. Pass its state_dict(), or what it consists of"
        ) from error


class StoredCheckpoint:
    """A complete checkpoint.

    Args:
        verify: compare checksums of what is read.

    Attributes:
        tensors, objects: what there is, by name.
        paths: of each name the keys in nested dicts.
    """

    def __init__(self, folder: str, verify: bool = True) -> None:
        self.folder, self._verify = folder, verify
        self.manifest: Manifest = read_manifest(folder, verify=verify)
        if verify:
            refuse_damage(folder, self.manifest, [METADATA])
        self.tensors, self.objects, self.paths = read_metadata(folder)

    # ------------------------------------------------------------ checksums
    def refuse_damage(self, records: Iterable[Record]) -> None:
        """Compares the checksums of records, each read once in full."""
        if not self._verify:
            return
        items = {(file, *i[:3]): i for file, f in self.manifest.files.items() for i in f.items}
        for record in sorted(set(records)):
            item = items.get((record.file, record.name, record.offset, record.length))
            if item is None or hash_of(self.read(record), self.manifest.hash) != item.hash:
                raise DamagedFileError(
                    f"{self.folder}: {record.file} ({record.name}) has other bytes than were written; nothing was "
                    "restored. Restore an earlier checkpoint, by its own folder"
                )

    # ------------------------------------------------------------ reading
    def object(self, name: str) -> Tree:
        """Returns an object, on the CPU."""
        record = self.objects[name]
        self.refuse_damage([record])
        return read_object(f"{self.folder}: {name}", self.read(record))

    def read(self, record: Record) -> bytes:
        """Reads the bytes of a record."""
        if record.file not in self.manifest.files:
            raise DamagedFileError(
                f"{self.folder}: {METADATA} names {record.file!r}, which is no file of the checkpoint"
            )
        record.check(self.folder)
        with open(os.path.join(self.folder, record.file), "rb") as file:
            file.seek(record.offset)
            return file.read(record.length)

    def under(self, *path: str) -> dict[Path, str]:
        """Returns names of everything below a path, by the rest of their paths."""
        count = len(path)
        return {p[count:]: name for name, p in self.paths.items() if p[:count] == path}
