"""Reads files of ``torch.save`` without running what a stranger may have put into them, and says what is damaged.

A file is a zip of records with checksums. :class:`Archive` finds them and says what is wrong with one;
:class:`Reading` interprets the pickle, so it can name the tensor that a damaged record belongs to.
"""

from __future__ import annotations

import io
import os
import stat
import struct
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, BinaryIO

import torch
from torch import nn

from ...errors import ConfigurationError, DamagedFileError, ShardkitError, UntrustedFileError
from ...torch_seams.tensors import memory_of
from ...torch_seams.wrappers import versions_of
from ...types import IncompatibleKeys, SavedState, StateDict, Tree
from .data_pickle import (
    Data,
    NotData,
    PickleMachine,
    Storage,
    StorageType,
    build,
    named_globals,
    names,
    whole,
    without_values,
)

LOCAL = b"PK\x03\x04"
_HEADER = 30  # bytes of a local header before the name; lengths of name and extra field end it
_PIECE = 1 << 22
_BEFORE_1_6 = (
    b"\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."  # torch.save's magic number then, in a pickle of any protocol
)


class Damage(Exception):
    """A file is not what was written; the arguments say how."""


def read_into(file: BinaryIO, tensor: torch.Tensor, crc: int | None) -> int | None:
    """Fills a contiguous tensor from where a file stands; returns the CRC-32 of what came before, and this."""
    memory, done = memory_of(tensor), 0
    while done < len(memory):
        piece = memory[done : done + _PIECE]
        count = file.readinto(piece)  # type: ignore[attr-defined]
        if not count:
            memory[done:] = bytes(len(memory) - done)
            raise Damage(f"it ends {len(memory) - done} bytes too early")
        crc = None if crc is None else zlib.crc32(piece[:count], crc)
        done += count
    return crc


class View:
    """Some bytes of a file, as a file; so many that are read, or those that are written from ``start`` on."""

    def __init__(self, file: BinaryIO, start: int, length: int = 0) -> None:
        self._file, self._start, self._length = file, start, length
        self._at = 0

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise OSError("a position before the beginning")
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, count: int = -1) -> bytes:
        left = max(0, self._length - self._at)
        self._file.seek(self._start + self._at)
        data = self._file.read(left if count < 0 else min(count, left))
        self._at += len(data)
        return data

    def write(self, data: bytes | memoryview) -> int:
        self._file.seek(self._start + self._at)
        count = self._file.write(data)
        self._at += count
        return count

    def flush(self) -> None:
        self._file.flush()

    def seekable(self) -> bool:
        return True


class Archive:
    """A zip file of records that are not compressed; a record's CRC-32 is the zip's own."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self._size = file, size
        try:
            self._zip = zipfile.ZipFile(file)
        except (zipfile.BadZipFile, NotImplementedError, struct.error, ValueError, OverflowError) as error:
            raise Damage("its table of contents is missing or unreadable") from error
        entries = self._zip.infolist()
        if sum(e.compress_size for e in entries) > size or any(e.compress_type for e in entries):
            raise Damage("its records overlap or are compressed, which torch.save doesn't do")
        if not all(0 <= e.header_offset < size for e in entries):
            raise Damage("its table of contents names records outside of it")
        # torch can be told to leave checksums out; then all are zero.
        self._has_checksums = any(e.CRC for e in entries)
        pickles = [
            e.filename for e in entries if e.filename.endswith("data.pkl") and e.filename.count("/") == 1
        ]
        if len(pickles) != 1:
            raise Damage("it has no data.pkl, so that torch.save has not written it")
        self._prefix = pickles[0].removesuffix("data.pkl")
        if self._prefix + "constants.pkl" in self._zip.NameToInfo:
            raise NotData("a TorchScript program")
        order = self._prefix + "byteorder"
        if order in self._zip.NameToInfo and self._record("byteorder") != b"little":
            raise Damage("its record 'byteorder' is not 'little', the only order that is read")

    def pickle(self) -> IO[bytes]:
        return io.BytesIO(self._record("data.pkl"))

    def where(self, key: str) -> tuple[int, int, int | None]:
        """Finds first byte, number of bytes and CRC-32 (None: the file has none) of a storage."""
        entry = self._entry(key)
        return self._start(entry), entry.file_size, entry.CRC if self._has_checksums else None

    def fill(self, key: str, storage: torch.UntypedStorage) -> None:
        """Reads a storage; raises Damage where something is wrong with it."""
        entry = self._entry(key)
        if entry.file_size != storage.nbytes() or entry.compress_size != entry.file_size:
            raise Damage(f"its record data/{key} has {entry.file_size} bytes, expected {storage.nbytes()}")
        self._file.seek(self._start(entry))
        crc: int | None = 0
        if storage.nbytes() > 0:
            crc = read_into(self._file, torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage), crc)
        if self._has_checksums and crc != entry.CRC:
            raise Damage(f"the checksum of its record data/{key} is {crc:#010x}, expected {entry.CRC:#010x}")

    def _entry(self, key: str) -> zipfile.ZipInfo:
        if (entry := self._zip.NameToInfo.get(f"{self._prefix}data/{key}")) is None:
            raise Damage(f"its record data/{key} is missing")
        return entry

    def _start(self, entry: zipfile.ZipInfo) -> int:
        self._file.seek(entry.header_offset)
        header = self._file.read(_HEADER)
        if len(header) < _HEADER or header[:4] != LOCAL:
            raise Damage(f"there is no record where {entry.filename} should begin")
        name, extra = struct.unpack("<HH", header[26:])
        if self._file.read(name) != entry.orig_filename.encode():
            raise Damage(f"there is another record where {entry.filename} should begin")
        return entry.header_offset + _HEADER + name + extra

    def _record(self, name: str) -> bytes:
        entry = self._zip.NameToInfo[self._prefix + name]
        self._file.seek(self._start(entry))
        data = self._file.read(min(entry.file_size, self._size))
        if len(data) < entry.file_size:
            raise Damage(f"its record {name} ends {entry.file_size - len(data)} bytes too early")
        if self._has_checksums and zlib.crc32(data) != entry.CRC:
            raise Damage(f"the checksum of its record {name} is not the one that was written")
        return data


# ------------------------------------------------------------ reading
# What a pickle that is no pickle, or parts that don't fit, come out as.
_UNFIT = (ValueError, TypeError, LookupError, AttributeError, OverflowError)
UNREADABLE = (*_UNFIT, RuntimeError, EOFError, MemoryError, struct.error)


def load(
    path: str | os.PathLike[str],
    *,
    map_location: torch.device | str | None = "cpu",
    trust_pickle: bool = False,
) -> Data:
    """Loads what ``torch.save`` has written: tensors, numbers, strings, containers and numpy arrays of numbers.

    That is all there is in state dicts of OSS, FSDP, AdaScale and the gradient scalers, fairscale's and shardkit's. A
    pickle can hold calls of any function; a file that needs another one to be read is refused. Nothing that the file
    names is called or looked up (see [Note: pickles as data] in ``files/data_pickle.py``), and tensors hold bytes of
    the file alone. The checksum of each tensor is compared, which ``torch.load`` doesn't do.

    Args:
        path: the file.
        map_location: where tensors go; None for where they were.
        trust_pickle: read it with ``torch.load``, whatever it calls, and without comparing checksums. Only for files of
            people you trust as you trust their programs.

    Raises:
        UntrustedFileError: the file calls what is in no state dict (the message says what), or is of before torch 1.6.
        DamagedFileError: the file is truncated or not what was written; the message names the tensor where it can.
        ConfigurationError: it is a pipe, a device or a folder.
        OSError: it can't be opened.
    """
    if trust_pickle:
        return torch.load(path, map_location=map_location, weights_only=False)
    name = os.fspath(path)
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise ConfigurationError(
            f"{name} is no regular file; pass the path of a file that torch.save has written"
        )
    with open(path, "rb") as file:
        return load_data(file, os.fstat(file.fileno()).st_size, name, map_location)


def load_data(file: BinaryIO, size: int, name: str, map_location: torch.device | str | None = "cpu") -> Data:
    """Loads from what is open already, of so many bytes; errors call it by the name."""
    with guarded(name):
        return Reading(name, file, size, map_location).result()


@contextmanager
def guarded(name: str) -> Iterator[None]:
    """Raises what is found in a file by this name, which is read inside, as errors for users."""
    try:
        yield
    except ShardkitError:
        raise
    except NotData as found:
        raise UntrustedFileError(
            f"{name} is not read, since it holds more than tensors, numbers and containers of them: "
            f"{', '.join(map(str, found.args))}. Reading that means running what it says. If you trust whoever "
            "wrote it, pass trust_pickle=True (--trust-pickle on command lines) and save it anew as a state dict"
        ) from found
    except Damage as found:
        raise _damaged(name, str(found)) from found
    except UNREADABLE as error:
        raise _damaged(name, f"its pickle makes no sense ({type(error).__name__}: {error})") from error


def _damaged(path: str, what: str) -> DamagedFileError:
    return DamagedFileError(
        f"{path} is damaged, or torch.save has not written it: {what}. Nothing was read; take another copy of the "
        "file, or an earlier checkpoint"
    )


class Reading:
    """One file being read: its pickle is interpreted, then its storages are filled and compared."""

    def __init__(self, path: str, file: BinaryIO, size: int, map_location: torch.device | str | None) -> None:
        self._path, self._file, self._size = path, file, size
        self._device = None if map_location is None else torch.device(map_location)
        self._left = self._size  # bytes that the storages not seen yet can have
        self.storages: dict[str, Storage] = {}
        self._locations: dict[str, str] = {}
        self._wrong: list[tuple[str, str]] = []  # storages, and what is wrong with them
        self._names = names(self._device_tensor)
        self.archive: Archive

    def open(self) -> set[str]:
        """Looks at the form of the file; returns what its pickle names."""
        if self._size == 0:
            raise Damage("it is empty")
        head = self._file.read(32)
        if _BEFORE_1_6 in head:
            raise UntrustedFileError(
                f"{self._path} is not read: torch.save's format of before torch 1.6 has no checksums. If you trust "
                "whoever wrote it, pass trust_pickle=True (--trust-pickle of ckpt show, diff and convert); "
                "torch.save(torch.load(path, weights_only=True), path) writes today's format"
            )
        if not head.startswith(LOCAL):
            raise Damage("it doesn't begin with a record")
        self.archive = Archive(self._file, self._size)
        named = named_globals(self.archive.pickle())
        unknown = sorted(named - set(self._names))
        if unknown:
            raise NotData(*unknown)
        return named

    def outline(self) -> Data:
        """Reads the pickle alone, with storages without memory."""
        return self._interpret(without_values(self._names), self._storage_without_bytes)

    def result(self) -> Data:
        self.open()
        found = self._interpret(self._names, self._storage)
        if self._wrong:
            (key, what), others = self._wrong[0], len(self._wrong) - 1
            path = _path_to(found, self.storages[key].memory)
            more = f" ({others} more tensors are damaged)" if others else ""
            raise Damage(f"tensor {path!r}: {what}{more}" if path is not None else f"a tensor: {what}{more}")
        return self._interpret(self._names, self._storage) if self._moves_storages() else found

    def _interpret(self, named: SavedState, storage: Callable[[tuple[object, ...]], Storage]) -> Data:
        return PickleMachine(named, storage, build).run(self.archive.pickle())

    def _storage(self, name: tuple[object, ...]) -> Storage:
        """Reads the storage that a persistent id stands for."""
        kind, key, location, size = storage_parts(name)
        if key in self.storages:
            return Storage(self.storages[key].memory, kind.dtype)
        if not 0 <= size <= self._left:
            self._wrong.append((key, f"it should have {size} bytes, more than the file has"))
            return self._storage_without_bytes(name)
        self._left -= size
        storage = Storage(torch.UntypedStorage(size), kind.dtype)
        try:
            self.archive.fill(key, storage.memory)
        except Damage as damage:
            self._wrong.append((key, str(damage)))
        self.storages[key], self._locations[key] = storage, location
        return storage

    def _storage_without_bytes(self, name: tuple[object, ...]) -> Storage:
        """Makes the storage that a persistent id stands for, on torch's device without memory."""
        kind, key, _, size = storage_parts(name)
        if key not in self.storages:
            self.storages[key] = Storage(torch.UntypedStorage(size, device="meta"), kind.dtype)
        return Storage(self.storages[key].memory, kind.dtype)

    def _device_tensor(
        self, tensor: torch.Tensor, dtype: torch.dtype, device: str, requires_grad: bool
    ) -> torch.Tensor:
        """Returns a tensor of a device that has no storages (XLA), which was saved as one of the CPU."""
        target = self._device or torch.device(device)
        return whole(tensor).to(dtype=dtype, device=target).requires_grad_(requires_grad)

    # ------------------------------------------------------------ devices
    def _moves_storages(self) -> bool:
        """Brings storages to where they shall be; whether any moved, so that tensors have to be made again."""
        places = {k: str(self._device or self._locations[k]) for k in self.storages}
        for key, place in places.items():
            storage = self.storages[key]
            try:
                memory = torch.serialization.default_restore_location(storage.memory, place)
            except RuntimeError as error:
                raise ConfigurationError(
                    f"{self._path}: tensors can't go to {place!r}: {error}; pass map_location"
                ) from error
            self.storages[key] = Storage(memory, storage.dtype)
        return any(place != "cpu" for place in places.values())


def storage_parts(name: tuple[Data, ...]) -> tuple[StorageType, str, str, int]:
    """Returns type, key, location and bytes of a persistent id ("storage", type, key, location, numel, ...)."""
    if len(name) < 5 or name[0] != "storage" or type(name[1]) is not StorageType or any(name[5:]):
        raise NotData("a reference to what is no storage")
    _, kind, key, location, numel, *_ = name
    if type(key) is not str or type(location) is not str or type(numel) is not int or not 0 <= numel < 2**58:
        raise ValueError("a storage without a name or a size")
    return kind, key, location, numel * (kind.dtype.itemsize if kind.dtype else 1)


def _path_to(found: Tree, memory: torch.UntypedStorage) -> str | None:
    """Finds where in an object a tensor over some memory is: its keys, joined by dots."""
    todo: list[tuple[str, object]] = [("", found)]
    seen: set[int] = set()
    while todo:
        path, value = todo.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            if value.layout == torch.strided and value.untyped_storage()._cdata == memory._cdata:
                return path or "the only one"
        elif isinstance(value, dict):
            todo += [(f"{path}.{k}" if path else str(k), v) for k, v in reversed(value.items())]
        elif isinstance(value, list | tuple):
            todo += [(f"{path}.{i}" if path else str(i), v) for i, v in reversed([*enumerate(value)])]
    return None


PREFIX = "module."


def without_prefix(state: SavedState, prefix: str = PREFIX) -> StateDict:
    """Returns the state dict of the module inside: every key without the prefix; unchanged if some key hasn't got it.

    Only the beginning of a key counts: ``head.module.weight`` keeps its name.
    """
    if not all(key.startswith(prefix) for key in state):
        return _renamed(state, lambda key: key)
    return _renamed(state, lambda key: key.removeprefix(prefix) if key.startswith(prefix) else "")


def with_prefix(state: SavedState, prefix: str = PREFIX) -> StateDict:
    """Returns the state dict of a wrapper: every key with the prefix; unchanged if all keys have it."""
    if state and all(key.startswith(prefix) for key in state):
        return _renamed(state, lambda key: key)
    return _renamed(state, lambda key: prefix + key)


def load_with_or_without_prefix(
    module: nn.Module, state: SavedState, strict: bool = True, prefix: str = PREFIX
) -> IncompatibleKeys:
    """Calls ``module.load_state_dict``, whether the state dict is of a wrapped module or not.

    Of the forms of the state dict (as it is, with the prefix, without it) the one is loaded that has most keys in
    common with the module; where none fits, ``load_state_dict`` says what is missing.
    """
    wanted = set(module.state_dict())
    forms = [dict(state), without_prefix(state, prefix), with_prefix(state, prefix)]
    best = max(forms, key=lambda form: len(wanted & set(form)))
    return module.load_state_dict(state if best is forms[0] else best, strict=strict)


def _renamed(state: SavedState, rename: Callable[[str], str]) -> StateDict:
    renamed: Tree = OrderedDict((rename(key), value) for key, value in state.items())
    metadata = versions_of(state)
    if metadata is not None:  # of modules, whose paths have no dot at the end; the root's is ""
        renamed._metadata = OrderedDict(
            (rename(key + ".").removesuffix("."), value) for key, value in metadata.items()
        )
    return renamed
