"""A checkpoint on the disk, whose records are compared with ``shardkit.json`` and read as data."""

from __future__ import annotations

import os
from collections.abc import Iterable

from ...errors import DamagedFileError
from ...types import Tree
from .hashing import hash_of
from .manifest import Manifest, read_manifest
from .metadata import METADATA, Path, Record, read_metadata
from .records import read_object
from .verifying import refuse_damage


class Stored:
    """A complete checkpoint.

    Args:
        folder: of the one checkpoint.
        verify: compare checksums of what is read.

    Attributes:
        tensors, objects: what there is, by name.
        paths: of each name the keys in nested dicts.

    Raises:
        ConfigurationError: it is no checkpoint.
        DamagedFileError: what says where things are is not as it was written.
        UntrustedFileError: it holds more than that.
    """

    def __init__(self, folder: str, verify: bool = True) -> None:
        self.folder, self._verify = folder, verify
        self.manifest: Manifest = read_manifest(folder, verify=verify)
        if verify:
            refuse_damage(folder, self.manifest, [METADATA])
        self.tensors, self.objects, self.paths = read_metadata(folder)

    # ------------------------------------------------------------ checksums
    def refuse_damage(self, records: Iterable[Record]) -> None:
        """Compares the checksums of records, each read once in full.

        Raises:
            DamagedFileError: names the file and the tensor.
        """
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
        """An object, on the CPU.

        Raises:
            DamagedFileError: it has other bytes than were written.
        """
        record = self.objects[name]
        self.refuse_damage([record])
        return read_object(f"{self.folder}: {name}", self.read(record))

    def read(self, record: Record) -> bytes:
        """Reads the bytes of a record.

        Raises:
            DamagedFileError: its file is missing, cut off, or none of the checkpoint's.
        """
        if record.file not in self.manifest.files:
            raise DamagedFileError(
                f"{self.folder}: {METADATA} names {record.file!r}, which is no file of the checkpoint"
            )
        record.check(self.folder)
        with open(os.path.join(self.folder, record.file), "rb") as file:
            file.seek(record.offset)
            return file.read(record.length)

    def under(self, *path: str) -> dict[Path, str]:
        """Names of everything below a path, by the rest of their paths."""
        count = len(path)
        return {p[count:]: name for name, p in self.paths.items() if p[:count] == path}
