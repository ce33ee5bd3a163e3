"""Compares a checkpoint's folder with its ``shardkit.json``; reads each file once, in blocks."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import BinaryIO, NamedTuple

from ...errors import DamagedFileError
from .hashing import new_hasher
from .manifest import Manifest, StoredFile, read_manifest

_BLOCK = 1 << 20  # bytes


class Damage(NamedTuple):
    """What is not as it was written.

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
) -> Iterator[Damage]:
    """All that is wrong, in the order of files and of what lies in them.

    Args:
        files: names of those to look at; default all.
    """
    for name in sorted(manifest.files) if files is None else files:
        yield from _damages_of(os.path.join(folder, name), name, manifest.files[name], manifest.hash)


def verify(folder: str | os.PathLike[str]) -> Manifest:
    """What the folder holds, all of which is as it was written.

    Raises:
        DamagedFileError: names the first file, and the tensor in it.
        ConfigurationError: it is no checkpoint.
    """
    manifest = read_manifest(folder)
    refuse_damage(folder, manifest)
    return manifest


def refuse_damage(
    folder: str | os.PathLike[str], manifest: Manifest, files: Iterable[str] | None = None
) -> None:
    """Raises for the first damage.

    Raises:
        DamagedFileError: names the file, and the tensor in it.
    """
    for damage in damages(folder, manifest, files):
        raise DamagedFileError(
            f"{os.fspath(folder)}: {damage}. Restore another checkpoint of this training "
            "(shardkit.restore_training takes its folder)"
        )


def _damages_of(path: str, name: str, stored: StoredFile, kind: str) -> Iterator[Damage]:
    try:
        size = os.stat(path).st_size
    except FileNotFoundError:
        yield Damage(name, None, "is missing")
        return
    found = False
    whole = new_hasher(kind)
    with open(path, "rb") as file:
        for item in stored.items:
            for block in _blocks(file, item.offset - file.tell()):
                whole.update(block)  # nothing lies between items, as DCP writes them
            own = new_hasher(kind)
            for block in _blocks(file, item.length):
                own.update(block)
                whole.update(block)
            if file.tell() < item.offset + item.length:
                found = True
                yield Damage(name, item.name, f"is cut off: the file has {size} bytes of {stored.bytes}")
            elif own.hexdigest() != item.hash:
                found = True
                yield Damage(name, item.name, "has other bytes than were written")
        for block in _blocks(file, None):
            whole.update(block)
    if not found and size != stored.bytes:
        yield Damage(name, None, f"has {size} bytes, and {stored.bytes} were written")
    elif not found and whole.hexdigest() != stored.hash:
        yield Damage(name, None, "has other bytes than were written")


def _blocks(file: BinaryIO, count: int | None) -> Iterator[bytes]:
    while count is None or count > 0:
        block = file.read(_BLOCK if count is None else min(count, _BLOCK))
        if not block:
            return
        if count is not None:
            count -= len(block)
        yield block
