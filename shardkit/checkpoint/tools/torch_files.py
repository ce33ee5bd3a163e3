"""Files of ``torch.save``: read with tensors that stay there until they are read; written tensor by tensor."""

from __future__ import annotations

import io
import os
import pickle
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Iterable
from typing import BinaryIO, NamedTuple, cast

import torch

from ...layout import whole_box
from ...torch_seams.tensors import contiguous_strides
from ...types import Tree
from ..files.data_pickle import LOOKING, STORAGES, Storage
from ..files.loading import LOCAL, Damage, Reading, View, guarded, load, load_data
from ..format.metadata import dotted
from .stored import FilePlace, Path, StoredPart, StoredTensor, in_memory, mapped


class Contents:
    """The contents of one file, or of a part of one.

    Args:
        name: of what it is, for messages.
    """

    def __init__(self, path: str, start: int, length: int, name: str) -> None:
        self._path, self._start, self._length = path, start, length
        self._name = f"{name} in {path}"
        if start == 0 and length == os.path.getsize(path):
            self._name = path

    def tree(self) -> Tree:
        """Reads the pickle; dense tensors are :class:`StoredTensor`, others as they are."""
        with open(self._path, "rb") as file, guarded(self._name):
            reading = Reading(self._name, cast(BinaryIO, self._part(file)), self._length, None)
            if not reading.open() & LOOKING:
                found = reading.outline()
                keys = {storage.memory._cdata: key for key, storage in reading.storages.items()}
                wheres = {k: (*reading.archive.where(k), storage) for k, storage in reading.storages.items()}
                return mapped(found, lambda path, value: self._stored(path, value, keys, wheres))
        return mapped(self.values(), held)

    def values(self) -> Tree:
        if self._name == self._path:
            return load(self._path)
        with open(self._path, "rb") as file:
            data = self._part(file).read()
        return load_data(io.BytesIO(data), len(data), self._name)

    def _part(self, file: BinaryIO) -> BinaryIO | View:
        return file if self._name == self._path else View(file, self._start, self._length)

    def _stored(
        self,
        path: Path,
        value: Tree,
        keys: dict[int, str],
        wheres: dict[str, tuple[int, int, int | None, Storage]],
    ) -> Tree:
        """Returns what stays in the file; storages are known by their C++ object."""
        if not isinstance(value, torch.Tensor):
            return value
        key = keys.get(value.untyped_storage()._cdata) if value.device.type == "meta" else None
        if key is None:
            return in_memory(dotted(path), value)
        begin, size, crc, storage = wheres[key]
        shape, strides = tuple(value.shape), tuple(value.stride())
        first = int(value.storage_offset()) * value.itemsize
        whole = first == 0 and value.numel() * value.itemsize == size
        offset = self._start + begin + first
        place = FilePlace(
            self._path, offset, None if value.is_contiguous() else strides, crc if whole else None
        )
        if first > size or storage.memory.nbytes() != size:
            raise Damage(f"its record data/{key} has {size} bytes, expected {storage.memory.nbytes()}")
        part = StoredPart(whole_box(shape), lambda: place)
        identity = (self._path, self._start, key, first, shape, strides, value.dtype)
        return StoredTensor(dotted(path), shape, value.dtype, (part,), value.dtype, identity)


def held(path: Path, value: Tree) -> Tree:
    """Returns a dense tensor that is in memory as a stored one."""
    if isinstance(value, torch.Tensor) and value.layout == torch.strided:
        return in_memory(dotted(path), value)
    return value


def read_torch_file(path: str, trust_pickle: bool = False) -> Tree:
    """Reads what is in a file, with tensors that stay there.

    Args:
        trust_pickle: let torch run what the file says; then all of it is read at once.
    """
    if trust_pickle:
        with open(path, "rb") as file:
            is_zip = file.read(len(LOCAL)) == LOCAL
        return mapped(torch.load(path, map_location="cpu", weights_only=False, mmap=is_zip), held)
    return Contents(path, 0, os.path.getsize(path), os.path.basename(path)).tree()


_ALIGNED = 64  # bytes; as torch aligns records
_LOCAL_HEADER = 30
_ZIP64_EXTRA = 20  # bytes of the field that zipfile adds where a record may be large
_OLD_STORAGES = {dtype: name for name, dtype in STORAGES.items()}


class _Storage(NamedTuple):
    """Stands for the storage of a tensor while it is pickled."""

    key: str
    dtype: torch.dtype
    numel: int


class _Pickler(pickle.Pickler):
    """Pickles a tree as torch.save does, with stored tensors as tensors; takes note of them."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=2)
        self.tensors: list[StoredTensor] = []
        self._keys: dict[object, _Storage] = {}
        self._kept: list[object] = []  # pickle knows objects by their address

    def persistent_id(self, obj: object) -> object:
        if not isinstance(obj, _Storage):
            return None
        kind, count = torch.UntypedStorage, obj.numel * obj.dtype.itemsize
        if obj.dtype in _OLD_STORAGES:
            kind, count = getattr(torch, f"{_OLD_STORAGES[obj.dtype]}Storage"), obj.numel
        return ("storage", kind, obj.key, "cpu", count)

    def reducer_override(self, obj: Tree) -> Tree:
        if not isinstance(obj, StoredTensor):
            return NotImplemented
        identity = id(obj) if obj.identity is None else (obj.identity, obj.dtype)
        storage = self._keys.get(identity)
        if storage is None:
            storage = self._keys[identity] = _Storage(str(len(self.tensors)), obj.dtype, obj.numel)
            self.tensors.append(obj)
        self._kept.append(obj)
        strides = contiguous_strides(obj.shape)
        arguments: tuple[object, ...] = (storage, 0, obj.shape, strides, False, OrderedDict())
        if obj.dtype in _OLD_STORAGES:
            return torch._utils._rebuild_tensor_v2, arguments
        return torch._utils._rebuild_tensor_v3, (*arguments, obj.dtype)


class TorchFileWriter:
    """One file of ``torch.save``, which may be a part of another.

    Args:
        file: it is written from where this stands.
        tree: containers, plain values and :class:`StoredTensor`; of those only name, shape and dtype are looked at.

    Attributes:
        tensors: those whose bytes are to be written, in this order; tied weights once.
    """

    def __init__(self, file: BinaryIO, tree: Tree) -> None:
        buffer = io.BytesIO()
        pickler = _Pickler(buffer)
        pickler.dump(tree)
        self.tensors = pickler.tensors
        self._written = 0
        self._zip = zipfile.ZipFile(cast(BinaryIO, View(file, file.tell())), "w", zipfile.ZIP_STORED)
        self._record("data.pkl", [buffer.getbuffer()], buffer.tell())
        self._record(".format_version", [b"1"], 1)
        self._record(".storage_alignment", [str(_ALIGNED).encode()], 2)
        self._record("byteorder", [sys.byteorder.encode()], len(sys.byteorder))

    @property
    def coming(self) -> list[StoredTensor]:
        """Returns the tensors that are not written yet."""
        return self.tensors[self._written :]

    def write_next(self, blocks: Iterable[memoryview | bytes]) -> None:
        """Writes the bytes of the next of ``tensors``."""
        self._record(f"data/{self._written}", blocks, self.tensors[self._written].nbytes)
        self._written += 1

    def __enter__(self) -> TorchFileWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Writes the end; after an error nothing more."""
        if kind is not None:
            self._zip.fp = None
            return
        if self._written != len(self.tensors):
            raise RuntimeError(f"{self._written} of {len(self.tensors)} tensors were written")
        self._record("version", [b"3\n"], 2)
        self._zip.close()

    def _record(self, name: str, blocks: Iterable[memoryview | bytes], size: int) -> None:
        # of the first day of zip's calendar: the same bytes every time
        info = zipfile.ZipInfo(f"archive/{name}")
        info.file_size = size
        large = size * 1.05 > zipfile.ZIP64_LIMIT  # zipfile's own rule
        begin = self._zip.start_dir + _LOCAL_HEADER + len(info.filename) + 4 + (_ZIP64_EXTRA if large else 0)
        padding = -begin % _ALIGNED
        info.extra = b"FB" + padding.to_bytes(2, "little") + b"Z" * padding
        with self._zip.open(info, "w") as record:
            written = 0
            for block in blocks:
                written += record.write(block)
        if written != size:
            raise RuntimeError(f"{name}: {written} bytes were written, expected {size}")


def write_torch_file(file: BinaryIO, tree: Tree) -> None:
    """Writes a whole tree, reading its tensors one at a time."""
    with TorchFileWriter(file, tree) as writer:
        for tensor in writer.tensors:
            writer.write_next(tensor.blocks())
