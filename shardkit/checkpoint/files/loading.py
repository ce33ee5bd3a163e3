"""Reads files of ``torch.save`` without running what a stranger may have put into them, and says what is damaged."""

from __future__ import annotations

import os
import stat
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import BinaryIO

import torch
from torch import nn

from ...errors import ConfigurationError, DamagedFileError, ShardkitError, UntrustedFileError
from ...torch_seams.module_versions import versions_of
from ...types import IncompatibleKeys, SavedState, StateDict, Tree
from .archive import LOCAL, Archive, Damage, Legacy, View
from .data_pickle import Data, NotData, PickleMachine, named_globals
from .rebuilding import Storage, StorageType, build, names, whole, without_values

# What a pickle that is no pickle, or parts that don't fit, come out as.
UNREADABLE = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    OverflowError,
    RuntimeError,
    EOFError,
    MemoryError,
    struct.error,
)


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
        UntrustedFileError: the file calls what is in no state dict; the message says what.
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
        self.archive: Archive | Legacy
        self._start = 0  # of the pickle

    def open(self) -> set[str]:
        """Looks at the form of the file; returns what its pickle names."""
        if self._size == 0:
            raise Damage("it is empty")
        if self._file.read(len(LOCAL)) == LOCAL:
            self.archive = Archive(self._file, self._size)
        elif isinstance(self._file, View):
            raise Damage("it doesn't begin with a record")
        else:
            self.archive = Legacy(self._file, self._size)
        source = self.archive.pickle()
        self._start = source.tell()
        named = named_globals(source)
        unknown = sorted(named - set(self._names))
        if unknown:
            raise NotData(*unknown)
        return named

    def outline(self) -> Data:
        """Reads the pickle alone, with storages without memory; sees whether those that it names are in the file."""
        found = self._interpret(without_values(self._names), self._storage_without_bytes)
        if isinstance(self.archive, Legacy):
            self._wrong += self.archive.missing(self.archive.pickle().tell())
        self._raise_what_is_wrong(found)
        return found

    def result(self) -> Data:
        """Returns the object."""
        self.open()
        if isinstance(self.archive, Legacy):
            self.outline()
            self.storages.clear()
        found = self._interpret(self._names, self._storage)
        self._raise_what_is_wrong(found)
        return self._interpret(self._names, self._storage) if self._moves_storages() else found

    def _interpret(self, named: SavedState, storage: Callable[[tuple[object, ...]], Storage]) -> Data:
        source = self.archive.pickle()
        source.seek(self._start)
        return PickleMachine(named, storage, build).run(source)

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
            if isinstance(self.archive, Legacy):
                self.archive.expect(key, size, kind.dtype.itemsize if kind.dtype else 1)
        return Storage(self.storages[key].memory, kind.dtype)

    def _device_tensor(
        self, tensor: torch.Tensor, dtype: torch.dtype, device: str, requires_grad: bool
    ) -> torch.Tensor:
        """Returns a tensor of a device that has no storages (XLA), which was saved as one of the CPU."""
        target = self._device or torch.device(device)
        return whole(tensor).to(dtype=dtype, device=target).requires_grad_(requires_grad)

    # ------------------------------------------------------------ damage
    def _raise_what_is_wrong(self, found: Tree) -> None:
        if not self._wrong:
            return
        (key, what), others = self._wrong[0], len(self._wrong) - 1
        path = _path_to(found, self.storages[key].memory)
        more = f" ({others} more tensors are damaged)" if others else ""
        raise Damage(f"tensor {path!r}: {what}{more}" if path is not None else f"a tensor: {what}{more}")

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
