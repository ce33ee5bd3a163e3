"""Writes checkpoints in torch's format, with checksums, whole or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any, BinaryIO, cast

import torch

from .writing import write_atomically


def save(obj: object, path: str | os.PathLike[str]) -> None:
    """``torch.save``, but a kill, a crash or a full disk leaves the file that was there, and all bytes have checksums.

    ``torch.load`` reads the file as any other; :func:`shardkit.load` compares the checksums. It is written beside the
    old one, synced and renamed: for a moment the disk holds both.

    Args:
        obj: what ``torch.save`` takes; what :func:`shardkit.load` shall read is tensors, numbers, strings, containers
            of them and numpy arrays of numbers.
        path: a regular file, or none yet, in a folder that exists.

    Raises:
        FileNotWrittenError: the disk is full, or the folder is missing or can't be written to (also an OSError).
        ConfigurationError: the path is a folder, a pipe or a device.
    """
    with write_atomically(path) as file, _checksums():
        guarded = _Guarded(file)
        try:
            torch.save(obj, cast(Any, guarded))
        except RuntimeError as error:
            raise guarded.failed or error from None
        if guarded.failed is not None:
            raise guarded.failed


@contextlib.contextmanager
def _checksums() -> Iterator[None]:
    """torch can be told to leave them out."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(True)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


class _Guarded:
    """A file that remembers the error of a failed write: torch's writer goes on after one and reports another."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.failed: OSError | None = None

    def write(self, data: bytes | memoryview) -> int:
        if self.failed is None:
            try:
                return self._file.write(data)
            except OSError as error:
                self.failed = error
        return len(data)

    def flush(self) -> None:
        """torch asks for it before the end."""
