"""Reads ``.metadata`` of torch's distributed checkpoints as data.

[Note: metadata as data] The file is a pickle, and ``FileSystemReader`` runs what it says. Here each name in it stands
for a class or a function of this module, or for a dtype; any other is refused before anything is called. The classes
keep what they are given, have no methods that do anything with it, and can't be changed by instructions that set
attributes. Instructions that torch doesn't use here are refused: some take memory of any size. So the machine is
Python's own in Python: the one in C takes no choice of instructions, and keeps an array as long as the largest number
that the file names.
"""

from __future__ import annotations

import os
import pickle
from collections import OrderedDict
from collections.abc import Sequence
from typing import ClassVar, NoReturn

import torch

from ..errors import DamagedFileError, UntrustedFileError
from ..types import AnyCallable, Tree

METADATA = ".metadata"
_DCP = "torch.distributed.checkpoint"


class _Fixed(type):
    """Its classes can't be changed."""

    def __setattr__(cls, name: str, value: object) -> NoReturn:
        raise TypeError("a class is changed")


class _Record(metaclass=_Fixed):
    """Attributes, as ``__setstate__`` gets them."""

    __slots__ = ("values",)

    def __setstate__(self, state: object) -> None:
        if not isinstance(state, dict | tuple):
            raise TypeError("the state of a record is neither a dict nor a tuple")
        self.values: Tree = state

    def get(self, name: str, default: object = None) -> Tree:
        """An attribute."""
        values = getattr(self, "values", None)
        return values.get(name, default) if isinstance(values, dict) else default


class Metadata(_Record):
    """The whole."""


class TensorFacts(_Record):
    """Of a tensor: properties, size, chunks."""


class Properties(_Record):
    """Of a tensor: dtype first."""


class Chunk(_Record):
    """A box of a tensor: offsets, sizes."""


class Bytes(_Record):
    """Stands for what is no tensor."""


class StorageFacts(_Record):
    """Where an item is: relative_path, offset, length."""


class Other(_Record):
    """What nothing here needs."""


class Index(_Record):
    """Name, and for tensors offsets, of an item; equal where both are."""

    def _key(self) -> tuple[object, ...]:
        offset = self.get("offset")
        return self.get("fqn"), None if offset is None else tuple(offset)

    def __hash__(self) -> int:
        return hash(self._key())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Index) and self._key() == other._key()


class _Size(metaclass=_Fixed):
    def __new__(cls, values: Sequence[int] = ()) -> Tree:
        if not all(type(v) is int and v >= 0 for v in values):
            raise TypeError("a size of what are no whole numbers")
        return tuple(values)


class _Text(metaclass=_Fixed):
    """Of a path."""

    def __new__(cls, *parts: str) -> Tree:
        return os.path.join("", *parts)


class _Nothing(metaclass=_Fixed):
    """A layout, a memory format: all tensors here are dense."""

    def __new__(cls, *_: object) -> Tree:
        return None


_NAMES: dict[tuple[str, str], object] = {
    (f"{_DCP}.metadata", "Metadata"): Metadata,
    (f"{_DCP}.metadata", "TensorStorageMetadata"): TensorFacts,
    (f"{_DCP}.metadata", "BytesStorageMetadata"): Bytes,
    (f"{_DCP}.metadata", "ChunkStorageMetadata"): Chunk,
    (f"{_DCP}.metadata", "TensorProperties"): Properties,
    (f"{_DCP}.metadata", "MetadataIndex"): Index,
    (f"{_DCP}.metadata", "StorageMeta"): Other,
    (f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING"): _Nothing,
    (f"{_DCP}.filesystem", "_StorageInfo"): StorageFacts,
    ("torch", "Size"): _Size,
    ("torch.serialization", "_get_layout"): _Nothing,
    ("collections", "OrderedDict"): OrderedDict,
    **{("torch", n): v for n, v in vars(torch).items() if isinstance(v, torch.dtype)},
    **{
        (module, name): _Text
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
    },
}


_INSTRUCTIONS = (
    "PROTO", "FRAME", "STOP", "MARK", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2",
    "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2",
    "TUPLE3", "EMPTY_LIST", "APPEND", "APPENDS", "EMPTY_DICT", "SETITEM", "SETITEMS", "GLOBAL",
    "STACK_GLOBAL", "REDUCE", "NEWOBJ", "BUILD", "MEMOIZE", "BINPUT", "LONG_BINPUT", "BINGET",
    "LONG_BINGET",
)  # fmt: skip


class _Reader(pickle._Unpickler):
    dispatch: ClassVar[dict[int, AnyCallable]] = {
        ord(getattr(pickle, name)): pickle._Unpickler.dispatch[ord(getattr(pickle, name))]
        for name in _INSTRUCTIONS
    }

    def find_class(self, module: str, name: str) -> Tree:
        found = _NAMES.get((module, name))
        if found is None:
            raise _Unknown(f"{module}.{name}")
        return found

    def persistent_load(self, pid: object) -> NoReturn:
        raise _Unknown("a reference to an object outside of the file")


class _Unknown(Exception):
    """A name that is in no ``.metadata``."""


def read_metadata(folder: str | os.PathLike[str]) -> Metadata:
    """The table of contents of a folder.

    Raises:
        UntrustedFileError: it names what is in none that torch writes.
        DamagedFileError: it makes no sense.
    """
    path = os.path.join(folder, METADATA)
    with open(path, "rb") as file:
        try:
            found = _Reader(file).load()
        except _Unknown as unknown:
            raise UntrustedFileError(
                f"{path} is not read, since it names {unknown}, which is in no table of contents that torch writes. "
                "Reading it with torch would run what it says"
            ) from None
        except Exception as error:  # noqa: BLE001  (a damaged pickle raises anything)
            raise DamagedFileError(
                f"{path} is damaged ({type(error).__name__}: {error}); take another copy, or an earlier checkpoint"
            ) from None
    if type(found) is not Metadata or not isinstance(found.get("state_dict_metadata"), dict):
        raise DamagedFileError(f"{path} is no table of contents of torch.distributed.checkpoint")
    return found
