"""Reads ``.metadata``, the table of contents of torch's distributed checkpoints (DCP), as data.

[Note: metadata as data]
The file is a pickle, and torch's ``FileSystemReader`` runs what it says. Here it is read by the machine of [Note:
pickles as data]; classes that it names stand for what keeps attributes. Then all of it is compared: names are text,
boxes lie in their tensors, records are long enough for what they are said to hold, lie in files of the folder, and none
lies in another. So nobody who goes by this table takes more memory than the folder has bytes.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, NoReturn

import torch

from ...errors import ConfigurationError, DamagedFileError, UntrustedFileError
from ...layout import Box
from ...types import T, Tree
from ..files.data_pickle import Function, Instance, NotData, PickleMachine, natural
from ..files.loading import UNREADABLE

METADATA = ".metadata"
_DCP = "torch.distributed.checkpoint"
_LARGEST = 2**62
_DEPTH = 256  # of nested containers

Shape = tuple[int, ...]
Path = tuple["str | int", ...]


def dotted(path: Iterable[object]) -> str:
    """Joins keys to a name, as DCP's planner does."""
    return ".".join(map(str, path))


class Record(NamedTuple):
    """A piece of a data file.

    Attributes:
        file: its name in the folder.
        offset, length: of the piece, in bytes.
        name: of the tensor or object that it belongs to.
    """

    file: str
    offset: int
    length: int
    name: str

    def check(self, folder: str | os.PathLike[str]) -> None:
        """Raises DamagedFileError for a file that is missing, or ends before."""
        path = os.path.join(folder, self.file)
        try:
            size = os.path.getsize(path)
        except FileNotFoundError:
            raise DamagedFileError(
                f"{path} is missing, and {self.name!r} lies in it; take another copy, or an earlier checkpoint"
            ) from None
        if self.offset + self.length > size:
            raise DamagedFileError(
                f"{path} is cut off: it has {size} bytes, and {self.name!r} ends at {self.offset + self.length}; take "
                "another copy, or an earlier checkpoint"
            )


class Chunk(NamedTuple):
    """A part of a tensor, and where it lies."""

    box: Box
    record: Record


class TensorEntry(NamedTuple):
    """A tensor. Its chunks need not be all of it."""

    dtype: torch.dtype
    shape: torch.Size
    chunks: tuple[Chunk, ...]


class TableOfContents(NamedTuple):
    """The tensors and objects of a folder.

    Attributes:
        tensors, objects: by flat name.
        paths: of each name the keys in nested dicts (text) and lists (numbers).
    """

    tensors: dict[str, TensorEntry]
    objects: dict[str, Record]
    paths: dict[str, Path]

    def records(self) -> Iterator[Record]:
        for entry in self.tensors.values():
            yield from (chunk.record for chunk in entry.chunks)
        yield from self.objects.values()

    def nested(self, values: Mapping[str, Tree]) -> Tree:
        """Returns values by name as the containers that were saved."""
        tree: dict[str | int, Tree] = {}
        for name, value in values.items():
            *above, last = self.paths[name]
            holder = tree
            for key in above:
                holder = holder.setdefault(key, _Level())
                if type(holder) is not _Level:
                    raise ValueError(f"{name!r} lies in a value")
            if last in holder:
                raise ValueError(f"{name!r} lies where another value is")
            holder[last] = value
        return _containers(tree)


class _Level(dict["str | int", Tree]):
    """A container by its keys."""


def _containers(level: Mapping[str | int, Tree]) -> Tree:
    made = {key: _containers(v) if type(v) is _Level else v for key, v in level.items()}
    numbers = [key for key in made if type(key) is int]
    if not numbers:
        return made
    if len(numbers) < len(made) or not 0 <= min(numbers) <= max(numbers) < 16 * len(made) + 64:
        raise ValueError("keys of a list are not the numbers of its elements")
    return [made.get(k) for k in range(max(numbers) + 1)]


def read_metadata(folder: str | os.PathLike[str]) -> TableOfContents:
    """Reads the table of contents of a folder; memory in proportion to the file."""
    path = os.path.join(folder, METADATA)
    if not os.path.isfile(path):
        raise ConfigurationError(f"{os.fspath(folder)} has no {METADATA}: it is no checkpoint")
    try:
        with open(path, "rb") as file:
            return _contents(PickleMachine(_NAMES, _refuse_storage, _set_state).run(io.BytesIO(file.read())))
    except NotData as found:
        raise UntrustedFileError(
            f"{path} is not read, since it holds what is in no table of contents that torch writes: "
            f"{', '.join(map(str, found.args))}. Reading it with torch would run what it says"
        ) from None
    except _Transformed as found:
        raise ConfigurationError(
            f"{path}: {found} was written through extensions (transform_descriptors), which are not read here; load "
            f"it with {_DCP} and save it without them"
        ) from None
    except UNREADABLE as error:
        raise DamagedFileError(
            f"{path} is damaged ({type(error).__name__}: {error}); take another copy, or an earlier checkpoint"
        ) from None


# ------------------------------------------------------------ what the pickle names
def _refuse_storage(_: tuple[object, ...]) -> NoReturn:
    raise NotData("a reference to an object outside of the file")


def _set_state(made: object, state: object) -> None:
    if type(made) is not Instance:
        raise NotData(f"the state of a {type(made).__name__}")
    made.state = state


def _instance_of(kind: str) -> Function:
    return Function(lambda: Instance(kind))


_NOTHING = Function(lambda *_: None)  # a layout, a memory format, a path: nothing here depends on it
_CLASSES = (
    "Metadata",
    "MetadataIndex",
    "StorageMeta",
    "TensorProperties",
    "TensorStorageMetadata",
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
)
_NAMES: dict[str, object] = {
    **{f"{_DCP}.metadata.{name}": _instance_of(name) for name in _CLASSES},
    f"{_DCP}.filesystem._StorageInfo": _instance_of("_StorageInfo"),
    f"{_DCP}.metadata._MEM_FORMAT_ENCODING": _NOTHING,
    "torch.serialization._get_layout": _NOTHING,
    "torch.Size": Function(lambda values=(): natural(values)),
    "collections.OrderedDict": Function(dict),
    **{f"torch.{n}": v for n, v in vars(torch).items() if isinstance(v, torch.dtype)},
    **{
        f"{module}.{name}": _NOTHING
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
    },
}


# ------------------------------------------------------------ what it says
class _Transformed(Exception):
    """Records are compressed or encrypted; the argument says whose."""


def typed(value: Tree, kind: type[T], what: str) -> T:
    """Refuses what is of another type, under the name ``what``."""
    if type(value) is not kind:
        raise ValueError(f"{what} is a {type(value).__name__}")
    return value


def _of_kind(value: Tree, kind: str) -> Instance:
    if type(value) is not Instance or value.kind != kind:
        raise ValueError(f"a {type(value).__name__} stands where a {kind} should")
    return value


def _contents(found: Tree) -> TableOfContents:
    root = _of_kind(found, "Metadata")
    records = dict(_records(typed(root.get("storage_data"), dict, "storage_data")))
    file, end = "", 0
    for record in sorted(records.values()):
        if record.file == file and record.offset < end:  # a folder would hold more bytes than it has
            raise ValueError(f"{record.name!r} lies in another record of {file!r}")
        file, end = record.file, record.offset + record.length
    table = TableOfContents({}, {}, {})
    given = root.get("planner_data")
    paths = given if type(given) is dict else {}
    for name, facts in typed(root.get("state_dict_metadata"), dict, "state_dict_metadata").items():
        name = typed(name, str, "a name")
        table.paths[name] = _path(paths.get(name, (name,)))
        if type(facts) is Instance and facts.kind == "TensorStorageMetadata":
            table.tensors[name] = _tensor(name, facts, records)
        else:
            _of_kind(facts, "BytesStorageMetadata")
            if (name, None) not in records:
                raise ValueError(f"{name!r} is in no file")
            table.objects[name] = records[name, None]
    return table


def _path(value: Tree) -> Path:
    keys = typed(value, tuple, "a path")
    if not 0 < len(keys) <= _DEPTH or not all(type(key) in (str, int) for key in keys):
        raise ValueError("a path leads nowhere")
    return keys


def _records(places: Mapping[Tree, Tree]) -> Iterator[tuple[tuple[str, Shape | None], Record]]:
    for index, facts in places.items():
        index, facts = _of_kind(index, "MetadataIndex"), _of_kind(facts, "_StorageInfo")
        name = typed(index.get("fqn"), str, "a name")
        file = typed(facts.get("relative_path"), str, "the name of a file")
        if os.path.basename(file) != file or file in ("", ".", "..") or "\0" in file:
            raise ValueError(f"{name!r} is said to lie in {file!r}, which is no file of the folder")
        if facts.get("transform_descriptors"):
            raise _Transformed(repr(name))
        offset, length = (typed(facts.get(what), int, f"the {what}") for what in ("offset", "length"))
        if not 0 <= offset < _LARGEST or not 0 < length < _LARGEST:
            raise ValueError(f"{name!r} lies nowhere")
        offsets = index.get("offset")
        yield (name, None if offsets is None else natural(offsets)), Record(file, offset, length, name)


def _tensor(name: str, facts: Instance, records: Mapping[tuple[str, Shape | None], Record]) -> TensorEntry:
    dtype = typed(_of_kind(facts.get("properties"), "TensorProperties").state, tuple, "properties")[0]
    dtype, shape = typed(dtype, torch.dtype, "a dtype"), torch.Size(natural(facts.get("size")))
    chunks = []
    for chunk in typed(facts.get("chunks"), list, "chunks"):
        chunk = _of_kind(chunk, "ChunkStorageMetadata")
        offsets, sizes = natural(chunk.get("offsets")), natural(chunk.get("sizes"))
        if len(offsets) != len(shape) or any(
            first + size > whole for first, size, whole in zip(offsets, sizes, shape, strict=True)
        ):
            raise ValueError(f"a part of {name!r} is outside of it")
        if (record := records.get((name, offsets))) is not None:
            if record.length < math.prod(sizes) * dtype.itemsize:
                raise ValueError(f"a part of {name!r} of sizes {sizes} can't lie in {record.length} bytes")
            chunks.append(Chunk(Box(offsets, sizes), record))
    return TensorEntry(dtype, shape, tuple(chunks))
