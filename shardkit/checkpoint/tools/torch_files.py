"""Files of ``torch.save``: what is in them, with tensors that stay there until they are read."""

from __future__ import annotations

import functools
import io
import os
from collections.abc import Callable
from typing import BinaryIO

import torch

from ...errors import DamagedFileError, UntrustedFileError
from ...types import SavedState, Tree
from ..files.archive import LOCAL, Archive, Damage, Legacy
from ..files.data_pickle import NotData, named_globals, read
from ..files.loading import UNREADABLE, load, load_data, storage_parts
from ..files.rebuilding import Storage, build, names, without_values
from .stored import Box, Place, StoredTensor, in_memory
from .trees import Path, dotted, replaced

# What looks at values while it is made; files with such tensors are read at once.
_LOOKING = frozenset(
    {"torch._utils._rebuild_sparse_tensor", "torch._utils._rebuild_device_tensor_from_cpu_tensor"}
)


class View:
    """Some bytes of a file, as a file."""

    def __init__(self, file: BinaryIO, start: int, length: int) -> None:
        self._file, self._start, self._length = file, start, length
        self._at = 0

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """As of any file."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise OSError("a position before the beginning")
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        """As of any file."""
        return self._at

    def read(self, count: int = -1) -> bytes:
        """As of any file."""
        left = max(0, self._length - self._at)
        self._file.seek(self._start + self._at)
        data = self._file.read(left if count < 0 else min(count, left))
        self._at += len(data)
        return data

    def readinto(self, target: memoryview) -> int:
        """As of any file."""
        data = self.read(len(target))
        target[: len(data)] = data
        return len(data)

    def seekable(self) -> bool:
        """It is."""
        return True


class Contents:
    """What one file, or a part of one, holds.

    Args:
        path: of the file.
        start, length: of the part.
        name: of what it is, for messages.
    """

    def __init__(self, path: str, start: int, length: int, name: str) -> None:
        self._path, self._start, self._name = path, start, name
        self._length = length
        self._keys: dict[int, str] = {}  # storages by their C++ object
        self._memory: dict[str, Storage] = {}

    def tree(self) -> Tree:
        """All of it; dense tensors as :class:`StoredTensor`, others as they are.

        Raises:
            UntrustedFileError, DamagedFileError: see :func:`shardkit.load`.
        """
        return self._guarded(self._tree)

    def values(self) -> Tree:
        """All of it, read."""
        if self._start == 0 and self._length == os.path.getsize(self._path):
            return load(self._path)
        with open(self._path, "rb") as file:
            file.seek(self._start)
            data = file.read(self._length)
        return load_data(io.BytesIO(data), len(data), f"{self._name} in {self._path}")

    def _guarded(self, call: Callable[[BinaryIO], Tree]) -> Tree:
        try:
            with open(self._path, "rb") as file:
                return call(file)
        except NotData as found:
            raise UntrustedFileError(
                f"{self._name} in {self._path} is not read, since it holds more than tensors, numbers and containers "
                f"of them: {', '.join(map(str, found.args))}. If you trust whoever wrote it, pass --trust-pickle"
            ) from None
        except Damage as found:
            raise self._damaged(str(found)) from None
        except DamagedFileError:
            raise
        except UNREADABLE as error:
            raise self._damaged(f"its pickle makes no sense ({type(error).__name__}: {error})") from None

    def _damaged(self, what: str) -> DamagedFileError:
        return DamagedFileError(
            f"{self._path} is damaged, or torch.save has not written it: {self._name}: {what}. Take another copy of "
            "the file, or an earlier checkpoint"
        )

    # ------------------------------------------------------------ reading the pickle
    def _archive(self, file: BinaryIO) -> Archive | Legacy:
        file.seek(self._start)
        if file.read(len(LOCAL)) == LOCAL:
            view = View(file, self._start, self._length)
            return Archive(view, self._length)  # type: ignore[arg-type]
        if self._start:
            raise Damage("it doesn't begin with a record")
        return Legacy(file, self._length)

    def _tree(self, file: BinaryIO) -> Tree:
        archive = self._archive(file)
        source = archive.pickle()
        start, known = source.tell(), _names()
        named = named_globals(source)
        unknown = sorted(name for name in named if name not in known)
        if unknown:
            raise NotData(*unknown)
        if named & _LOOKING:
            return replaced(self.values(), held)
        source.seek(start)

        def empty(name: tuple[object, ...]) -> Storage:
            kind, key, _, size = storage_parts(name)
            if key not in self._memory:
                self._memory[key] = Storage(torch.UntypedStorage(size, device="meta"), kind.dtype)
                self._keys[self._memory[key].memory._cdata] = key
                if isinstance(archive, Legacy):
                    archive.expect(key, size, kind.dtype.itemsize if kind.dtype else 1)
            return Storage(self._memory[key].memory, kind.dtype)

        found = read(source, known, empty, build)
        if isinstance(archive, Legacy):
            for _, wrong in archive.missing(archive.pickle().tell()):
                raise Damage(wrong)
        wheres = {key: archive.where(key) for key in self._memory}
        return replaced(found, lambda path, value: self._stored(path, value, wheres))

    def _stored(self, path: Path, value: Tree, wheres: dict[str, tuple[int, int, int | None]]) -> Tree:
        if not isinstance(value, torch.Tensor):
            return value
        key = self._keys.get(value.untyped_storage()._cdata) if value.device.type == "meta" else None
        if key is None:
            return in_memory(dotted(path), value)
        begin, size, crc = wheres[key]
        shape, strides = tuple(value.shape), tuple(value.stride())
        first = int(value.storage_offset()) * value.itemsize
        whole = first == 0 and value.numel() * value.itemsize == size
        offset = self._start + begin + first
        place = Place(self._path, offset, None if value.is_contiguous() else strides, crc if whole else None)
        if first > size or self._memory[key].memory.nbytes() != size:
            raise Damage(
                f"its record data/{key} has {size} bytes, expected {self._memory[key].memory.nbytes()}"
            )
        box = Box((0,) * len(shape), shape, lambda: place)
        identity = (self._path, self._start, key, first, shape, strides, value.dtype)
        return StoredTensor(dotted(path), shape, value.dtype, (box,), value.dtype, identity)


def held(path: Path, value: Tree) -> Tree:
    """A dense tensor that is in memory as a stored one."""
    if isinstance(value, torch.Tensor) and value.layout == torch.strided:
        return in_memory(dotted(path), value)
    return value


def _on_host(tensor: torch.Tensor, dtype: torch.dtype, device: str, requires_grad: bool) -> torch.Tensor:
    return tensor.to(dtype=dtype)


@functools.cache
def _names() -> SavedState:
    """All that a file may name, while storages are not filled. A checkpoint may have a million chunks, each a file."""
    return without_values(names(_on_host))


def read_torch_file(path: str, trust_pickle: bool = False) -> Tree:
    """What is in a file, with tensors that stay there.

    Args:
        trust_pickle: let torch run what the file says; then all of it is read at once.

    Raises:
        UntrustedFileError, DamagedFileError: see :func:`shardkit.load`.
    """
    if trust_pickle:
        return replaced(torch.load(path, map_location="cpu", weights_only=False, mmap=_is_zip(path)), held)
    return Contents(path, 0, os.path.getsize(path), os.path.basename(path)).tree()


def _is_zip(path: str) -> bool:
    with open(path, "rb") as file:
        return file.read(len(LOCAL)) == LOCAL
