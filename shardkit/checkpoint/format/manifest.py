"""``shardkit.json``: what a checkpoint's folder has to hold, with checksums, file by file and item by item.

A folder that has one was complete when it was written. The file has a checksum of its own, so that not a byte of a
checkpoint is trusted unseen. Checksums are xxhash's where it is installed, else those of Python's own library.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import importlib.util
import io
import json
import os
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch

from ...errors import ConfigurationError, DamagedFileError
from ...types import StateDict, Tree
from ...version import __version_tuple__
from ..files.loading import load_data
from ..files.writing import write_atomically
from .metadata import METADATA, Path, Record, read_metadata, typed

XXH3 = "xxh3_64"
SHA256 = "sha256"


class Hasher(Protocol):
    """The interface that both libraries' objects have."""

    def update(self, data: bytes | bytearray | memoryview, /) -> None: ...
    def hexdigest(self) -> str: ...


def best_hash() -> str:
    """Returns the quickest one that this environment has; the slower one is in every Python."""
    return XXH3 if importlib.util.find_spec("xxhash") is not None else SHA256


def new_hasher(name: str) -> Hasher:
    if name == SHA256:
        return hashlib.sha256()
    if name != XXH3:
        raise ConfigurationError(
            f"checksums of kind {name!r} are unknown here; known are {XXH3} and {SHA256}"
        )
    try:
        import xxhash
    except ImportError:
        raise ConfigurationError(
            "the checksums of this checkpoint are xxhash's, which is not installed: pip install xxhash, "
            "or read without comparing them (verify=False)"
        ) from None
    return xxhash.xxh3_64()  # type: ignore[no-any-return]


def hash_of(data: bytes | bytearray | memoryview, name: str) -> str:
    """Hashes bytes that are in memory; in hexadecimal digits."""
    hasher = new_hasher(name)
    hasher.update(data)
    return hasher.hexdigest()


FORMAT = 2  # 1: with a checksum of all of a file that has items, too
NAME = "shardkit.json"
_OWN = "hash_of_this"


class ManifestItem(NamedTuple):
    """One record of a data file: a part of a tensor, or an object.

    Attributes:
        name: under which the state dict has it, as "model.layer.weight".
        offset: of its first byte in the file.
        length: in bytes.
        hash: in hexadecimal digits.
    """

    name: str
    offset: int
    length: int
    hash: str


@dataclasses.dataclass(frozen=True)
class StoredFile:
    """A file of a checkpoint's folder.

    Attributes:
        hash: of a file without items.
        items: those of a data file, end to end, in the order in which they lie; none of others.
    """

    bytes: int
    hash: str
    items: tuple[ManifestItem, ...] = ()


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The contents of ``shardkit.json``.

    Attributes:
        step: which the training had done.
        run: of which the checkpoint is.
        world_size: ranks that wrote it.
        files: by name, all but ``shardkit.json`` itself.
        hash: kind of all checksums, see :func:`best_hash`.
        versions: of what it was written with.
        written: UTC, ISO 8601.
        format: of this file.
    """

    step: int
    run: str
    world_size: int
    files: Mapping[str, StoredFile]
    hash: str
    versions: Mapping[str, str] = dataclasses.field(default_factory=lambda: versions_here())
    written: str = dataclasses.field(
        default_factory=lambda: datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    )
    format: int = FORMAT

    @property
    def facts(self) -> StateDict:
        """Lists what is known of the checkpoint beside what it holds."""
        known = {name: getattr(self, name) for name in ("step", "world_size", "written", "run")}
        return {**known, "versions": dict(self.versions)}


def versions_here() -> dict[str, str]:
    """Tells the versions of this package, torch and Python."""
    own = ".".join(map(str, __version_tuple__))
    return {"shardkit": own, "torch": str(torch.__version__), "python": platform.python_version()}


def write_manifest(folder: str | os.PathLike[str], manifest: Manifest) -> None:
    """Writes ``shardkit.json`` with a checksum of its own, synced, whole or not at all; keys as they are declared."""
    files = {name: vars(stored) for name, stored in sorted(manifest.files.items())}
    values = {**vars(manifest), "versions": dict(manifest.versions), "files": files}
    text = json.dumps({**values, _OWN: _hash_of(values, manifest.hash)}, indent=None) + "\n"
    with write_atomically(os.path.join(folder, NAME)) as file:
        file.write(text.encode())


def read_manifest(folder: str | os.PathLike[str], *, verify: bool = True) -> Manifest:
    """Reads what the folder of one checkpoint has to hold.

    Args:
        verify: compare the checksum of the file itself (files are compared by :func:`damages`).
    """
    path = os.path.join(folder, NAME)
    try:
        with open(path, "rb") as file:
            text = file.read()
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigurationError(
            f"{os.fspath(folder)} has no {NAME}: it is no complete checkpoint of shardkit.save_training"
        ) from None
    try:
        values = json.loads(text)
        if not isinstance(values, dict):
            raise TypeError("no object")
        own = values.pop(_OWN)
        if isinstance(values["format"], int) and values["format"] > FORMAT:
            raise ConfigurationError(
                f"{path} has format {values['format']}, a later one wrote it; shardkit here reads {FORMAT}"
            )
        made = _manifest_of(values)
        if verify and _hash_of(values, made.hash) != own:
            raise ValueError("its checksum is another")
        return made
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        if isinstance(error, ConfigurationError):
            raise
        raise DamagedFileError(f"{path} has other bytes than were written ({error})") from None


def _hash_of(values: Mapping[str, object], kind: str) -> str:
    return hash_of(json.dumps(values, sort_keys=True, separators=(",", ":")).encode(), kind)


def _manifest_of(values: Mapping[str, object]) -> Manifest:
    files = {}
    kinds: dict[str, type] = dict.fromkeys(("step", "world_size", "format"), int)
    kinds |= dict.fromkeys(("run", "hash", "written"), str)
    facts: StateDict = {name: typed(values[name], kind, name) for name, kind in kinds.items()}
    for name, stored in typed(values["files"], dict, "files").items():
        if os.path.basename(name) != name or name in ("", ".", ".."):
            raise ValueError(f"{name!r} is no name of a file in the folder")
        items = [ManifestItem(*values) for values in stored["items"]]
        for item in items:
            for value, kind in zip(item, (str, int, int, str), strict=True):
                typed(value, kind, f"something of {name!r}")
        size, digest = typed(stored["bytes"], int, "a size"), typed(stored["hash"], str, "a checksum")
        files[name] = StoredFile(size, digest, tuple(items))
    return Manifest(files=files, versions=typed(values["versions"], dict, "versions"), **facts)


_BLOCK = 1 << 20  # bytes


class DamagedItem(NamedTuple):
    """One thing that is not as it was written.

    Attributes:
        file: its name in the folder.
        name: the tensor or object that the bytes belong to; None where the file as a whole is meant.
        what: "is missing", "has other bytes than were written", ...
    """

    file: str
    name: str | None
    what: str

    def __str__(self) -> str:
        return f"{self.file}{'' if self.name is None else f' ({self.name})'} {self.what}"


def damages(
    folder: str | os.PathLike[str], manifest: Manifest, files: Iterable[str] | None = None
) -> Iterator[DamagedItem]:
    """Yields all that is wrong, in the order of files and of what lies in them.

    Args:
        files: names of those to look at; default all.
    """
    for name in sorted(manifest.files) if files is None else files:
        yield from _damages_of(os.path.join(folder, name), name, manifest.files[name], manifest.hash)


def refuse_damage(
    folder: str | os.PathLike[str], manifest: Manifest, files: Iterable[str] | None = None
) -> None:
    """Raises for the first damage."""
    for damage in damages(folder, manifest, files):
        raise DamagedFileError(
            f"{os.fspath(folder)}: {damage}. Restore another checkpoint of this training "
            "(shardkit.restore_training takes its folder)"
        )


def _damages_of(path: str, name: str, stored: StoredFile, kind: str) -> Iterator[DamagedItem]:
    try:
        size = os.stat(path).st_size
    except FileNotFoundError:
        yield DamagedItem(name, None, "is missing")
        return
    now, found = stored_file(path, stored.items, kind), False
    for item, here in zip(stored.items, now.items, strict=True):
        if here.length < item.length:
            found = True
            yield DamagedItem(name, item.name, f"is cut off: the file has {size} bytes of {stored.bytes}")
        elif here.hash != item.hash:
            found = True
            yield DamagedItem(name, item.name, "has other bytes than were written")
    if not found and size != stored.bytes:
        yield DamagedItem(name, None, f"has {size} bytes, and {stored.bytes} were written")
    elif not stored.items and now.hash != stored.hash:
        yield DamagedItem(name, None, "has other bytes than were written")


def stored_file(path: str, items: Sequence[ManifestItem], kind: str) -> StoredFile:
    """Computes the checksums of a file as it is: of the items that lie in it end to end, or of all of it."""
    size, found = os.path.getsize(path), []
    with open(path, "rb") as file:
        for item in [*items] or [ManifestItem("", 0, size, "")]:
            file.seek(item.offset)
            own, left = new_hasher(kind), item.length
            while left > 0 and (block := file.read(min(left, _BLOCK))):
                own.update(block)
                left -= len(block)
            found.append(item._replace(length=item.length - left, hash=own.hexdigest()))
    return StoredFile(size, "", tuple(found)) if items else StoredFile(size, found[0].hash)


# ------------------------------------------------------------ a checkpoint on the disk
def read_object(name: str, data: bytes) -> Tree:
    """Reads a record of an object or a tensor, to the CPU."""
    return load_data(io.BytesIO(data), len(data), name)


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
        files = self.manifest.files.items()
        hashes = {Record(file, i.offset, i.length, i.name): i.hash for file, f in files for i in f.items}
        for record in sorted(set(records)):
            if hash_of(self.read(record), self.manifest.hash) != hashes.get(record):
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
