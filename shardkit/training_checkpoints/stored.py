"""A checkpoint on the disk: what DCP's ``.metadata`` says is where, read as data."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch.distributed.checkpoint import filesystem, metadata

from ..errors import ConfigurationError, DamagedFileError, UntrustedFileError
from ..types import Tree
from .hashing import hash_of
from .manifest import METADATA, Manifest, read_manifest
from .records import read_object
from .verifying import refuse_damage

Path = tuple["str | int", ...]


class Place(NamedTuple):
    """Where a record is."""

    file: str
    offset: int
    length: int


class Chunk(NamedTuple):
    """A stored part of a tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    place: Place


class StoredTensor(NamedTuple):
    """A tensor of a checkpoint."""

    dtype: torch.dtype
    shape: torch.Size
    chunks: tuple[Chunk, ...]


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
        found = read_metadata(folder)
        self.paths: dict[str, Path] = dict(found.planner_data or {})
        self.tensors: dict[str, StoredTensor] = {}
        self.objects: dict[str, Place] = {}
        places = {
            (i.fqn, i.offset): Place(s.relative_path, s.offset, s.length)
            for i, s in found.storage_data.items()
        }
        for name, stored in found.state_dict_metadata.items():
            if isinstance(stored, metadata.TensorStorageMetadata):
                chunks = tuple(
                    Chunk(tuple(c.offsets), tuple(c.sizes), places[name, c.offsets]) for c in stored.chunks
                )
                self.tensors[name] = StoredTensor(stored.properties.dtype, stored.size, chunks)
            else:
                self.objects[name] = places[name, None]

    # ------------------------------------------------------------ checksums
    def refuse_damage(self, places: Iterable[Place]) -> None:
        """Compares the checksums of records, each read once in full.

        Raises:
            DamagedFileError: names the file and the tensor.
        """
        if not self._verify:
            return
        for file, wanted in _by_file(places).items():
            items = {(i.offset, i.length): i for i in self.manifest.files[file].items}
            with self._opened(file) as opened:
                for place in wanted:
                    item = items[place.offset, place.length]
                    opened.seek(place.offset)
                    if hash_of(opened.read(place.length), self.manifest.hash) != item.hash:
                        raise DamagedFileError(
                            f"{self.folder}: {file} ({item.name}) has other bytes than were written; nothing was "
                            "restored. Restore an earlier checkpoint, by its own folder"
                        )

    # ------------------------------------------------------------ reading
    def object(self, name: str) -> Tree:
        """An object, on the CPU.

        Raises:
            DamagedFileError: it has other bytes than were written.
        """
        place = self.objects[name]
        self.refuse_damage([place])
        return read_object(f"{self.folder}: {name}", self.read(place))

    def read(self, place: Place) -> bytes:
        """The bytes of a record."""
        with self._opened(place.file) as file:
            file.seek(place.offset)
            return file.read(place.length)

    def _opened(self, name: str):  # type: ignore[no-untyped-def]
        if name not in self.manifest.files:
            raise DamagedFileError(
                f"{self.folder}: {METADATA} names {name!r}, which is no file of the checkpoint"
            )
        try:
            return open(os.path.join(self.folder, name), "rb")
        except FileNotFoundError:
            raise DamagedFileError(f"{self.folder}: {name} is missing; restore another checkpoint") from None

    def under(self, *path: str) -> dict[Path, str]:
        """Names of everything below a path, by the rest of their paths."""
        count = len(path)
        return {p[count:]: name for name, p in self.paths.items() if p[:count] == path}


def _by_file(places: Iterable[Place]) -> dict[str, list[Place]]:
    found: dict[str, list[Place]] = {}
    for place in sorted(set(places)):
        found.setdefault(place.file, []).append(place)
    return found


# ------------------------------------------------------------ .metadata
_CLASSES = {
    ("torch.distributed.checkpoint.metadata", name): getattr(metadata, name)
    for name in (
        "Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata", "BytesStorageMetadata",
        "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
    )
} | {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): filesystem._StorageInfo,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("pathlib", "PosixPath"): str,
    ("pathlib", "WindowsPath"): str,
}  # fmt: skip


class _OfData(pickle.Unpickler):
    """Knows the classes that DCP's metadata consist of, and no function that would do something."""

    def find_class(self, module: str, name: str) -> Tree:
        if (module, name) in _CLASSES:
            return _CLASSES[module, name]
        found = getattr(torch, name, None) if module == "torch" else None
        if isinstance(found, torch.dtype):
            return found
        raise UntrustedFileError(
            f"{METADATA} names {module}.{name}, which is not part of what torch.distributed.checkpoint writes: reading "
            "it would run what it says"
        )


def read_metadata(folder: str | os.PathLike[str]) -> metadata.Metadata:
    """DCP's ``.metadata``, without running what a stranger may have put into it.

    Raises:
        ConfigurationError: there is none.
        UntrustedFileError: it names something else than DCP does.
        DamagedFileError: it is no pickle of that.
    """
    path = os.path.join(folder, METADATA)
    try:
        with open(path, "rb") as file:
            found = _OfData(file).load()
    except FileNotFoundError:
        raise ConfigurationError(f"{os.fspath(folder)} has no {METADATA}: it is no checkpoint") from None
    except UntrustedFileError:
        raise
    except Exception as error:
        raise DamagedFileError(f"{path} is damaged ({type(error).__name__}: {error})") from error
    if not isinstance(found, metadata.Metadata):
        raise DamagedFileError(
            f"{path} holds a {type(found).__name__}, not what torch.distributed.checkpoint writes"
        )
    return found
