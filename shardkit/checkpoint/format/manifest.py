"""``shardkit.json``: what a checkpoint's folder has to hold, file by file and item by item.

A folder that has one was complete when it was written. The file has a checksum of its own, so that not a byte of a
checkpoint is trusted unseen.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import platform
from collections.abc import Mapping
from typing import NamedTuple, TypeVar

import torch

from ...errors import ConfigurationError, DamagedFileError
from ...version import __version_tuple__
from ..files.writing import write_atomically
from .hashing import hash_of

FORMAT = 1
NAME = "shardkit.json"
_OWN = "hash_of_this"
T = TypeVar("T")


class Item(NamedTuple):
    """What DCP stored in one piece of a file: a part of a tensor, or an object.

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
        bytes: its length.
        hash: of all of it.
        items: those of a data file, in the order in which they lie; none of others.
    """

    bytes: int
    hash: str
    items: tuple[Item, ...] = ()


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What ``shardkit.json`` says.

    Attributes:
        step: which the training had done.
        run: of which the checkpoint is.
        world_size: ranks that wrote it.
        files: by name, all but ``shardkit.json`` itself.
        hash: kind of all checksums (see ``hashing``).
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
    written: str = dataclasses.field(default_factory=lambda: now())
    format: int = FORMAT

    def to_json(self) -> str:
        """Text with a checksum of its own; keys as they are declared above."""
        values: dict[str, object] = {
            "format": self.format,
            "step": self.step,
            "run": self.run,
            "world_size": self.world_size,
            "versions": dict(self.versions),
            "written": self.written,
            "hash": self.hash,
            "files": {
                name: {"bytes": f.bytes, "hash": f.hash, "items": [list(i) for i in f.items]}
                for name, f in sorted(self.files.items())
            },
        }
        return json.dumps({**values, _OWN: _hash_of(values, self.hash)}, indent=None) + "\n"


def versions_here() -> dict[str, str]:
    """Of this package, torch and Python."""
    own = ".".join(map(str, __version_tuple__))
    return {"shardkit": own, "torch": str(torch.__version__), "python": platform.python_version()}


def now() -> str:
    """The time, as a manifest has it."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def write_manifest(folder: str | os.PathLike[str], manifest: Manifest) -> None:
    """Writes ``shardkit.json``, synced, whole or not at all.

    Raises:
        FileNotWrittenError: the disk is full, or the folder can't be written to.
    """
    with write_atomically(os.path.join(folder, NAME)) as file:
        file.write(manifest.to_json().encode())


def read_manifest(folder: str | os.PathLike[str], *, verify: bool = True) -> Manifest:
    """What the folder of one checkpoint has to hold.

    Args:
        verify: compare the checksum of the file itself (files are compared by ``verifying``).

    Raises:
        ConfigurationError: there is no such file, so it is no complete checkpoint; or a later version wrote it.
        DamagedFileError: it has other bytes than were written.
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
    for name, stored in _typed(values["files"], dict).items():
        if os.path.basename(name) != name or name in ("", ".", ".."):
            raise ValueError(f"{name!r} is no name of a file in the folder")
        items = tuple(
            Item(_typed(n, str), _typed(o, int), _typed(k, int), _typed(h, str))
            for n, o, k, h in stored["items"]
        )
        files[name] = StoredFile(_typed(stored["bytes"], int), _typed(stored["hash"], str), items)
    return Manifest(
        step=_typed(values["step"], int),
        run=_typed(values["run"], str),
        world_size=_typed(values["world_size"], int),
        files=files,
        hash=_typed(values["hash"], str),
        versions=_typed(values["versions"], dict),
        written=_typed(values["written"], str),
        format=_typed(values["format"], int),
    )


def _typed(value: object, kind: type[T]) -> T:
    if not isinstance(value, kind):
        raise TypeError(f"{value!r} is no {kind.__name__}")
    return value
