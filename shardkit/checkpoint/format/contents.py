"""What a checkpoint's folder holds: ``.metadata``, the table of contents of torch's distributed checkpoints (DCP), and
``shardkit.json``: what has to be there, with checksums, file by file and item by item.

A folder that has a ``shardkit.json`` was complete when it was written. The file has a checksum of its own, so that not
a byte of a checkpoint is trusted unseen. Checksums are xxhash's where it is installed, else those of Python's library.

[Note: metadata as data]
The file is a pickle, and torch's ``FileSystemReader`` runs what it says. Here it is read by the machine of [Note:
pickles as data]; classes that it names stand for what keeps attributes. Then all of it is compared: names are text,
boxes lie in their tensors, records are long enough for what they are said to hold, lie in files of the folder, and none
lies in another. So nobody who goes by this table takes more memory than the folder has bytes.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import importlib.util
import io
import json
import math
import os
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, NoReturn, Protocol

import torch

from ...errors import ConfigurationError, DamagedFileError, UntrustedFileError
from ...layout import Box
from ...types import StateDict, T, Tree
from ...version import __version_tuple__
from ..files.data_pickle import Function, Instance, NotData, PickleMachine, natural
from ..files.loading import UNREADABLE, load_data
from ..files.writing import write_atomically

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
            return _table(PickleMachine(_NAMES, _refuse_storage, _set_state).run(io.BytesIO(file.read())))
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


def _table(found: Tree) -> TableOfContents:
    root = _of_kind(found, "Metadata")
    records = dict(_records(typed(root.get("storage_data"), dict, "storage_data")))
    _check_overlaps(records.values())
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


def _check_overlaps(records: Iterable[Record]) -> None:
    """Refuses records in each other: a folder would hold more bytes than it has."""
    file, end = "", 0
    for record in sorted(records):
        if record.file == file and record.offset < end:
            raise ValueError(f"{record.name!r} lies in another record of {file!r}")
        file, end = record.file, record.offset + record.length


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
        record = records.get((name, offsets))
        if record is not None:
            if record.length < math.prod(sizes) * dtype.itemsize:
                raise ValueError(f"a part of {name!r} of sizes {sizes} can't lie in {record.length} bytes")
            chunks.append(Chunk(Box(offsets, sizes), record))
    return TensorEntry(dtype, shape, tuple(chunks))


# ------------------------------------------------------------ shardkit.json
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
    """Returns a hash that has seen nothing yet."""
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
    hasher: Hasher = xxhash.xxh3_64()
    return hasher


def hash_of(data: bytes | bytearray | memoryview, name: str) -> str:
    """Hashes bytes that are in memory; in hexadecimal digits."""
    hasher = new_hasher(name)
    hasher.update(data)
    return hasher.hexdigest()


FORMAT = 1
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
    """Reads a record of an object, to the CPU."""
    return load_data(io.BytesIO(data), len(data), name)


def read_tensor(name: str, data: bytes, sizes: tuple[int, ...]) -> torch.Tensor:
    """Reads a record of a tensor of these sizes, to the CPU."""
    found = read_object(name, data)
    if not isinstance(found, torch.Tensor) or tuple(found.shape) != sizes:
        raise DamagedFileError(
            f"{name} is no tensor of sizes {sizes}, which the checkpoint should have there"
        )
    return found.detach()


def refuse_what_is_no_data(name: str, data: bytes) -> None:
    """Raises for a record that could not be read again."""
    try:
        read_object(name, data)
    except UntrustedFileError as error:
        raise ConfigurationError(
            f"{name!r} can't be saved, since it holds more than tensors, numbers, strings and containers of them: "
            f"{error.__cause__}. Pass its state_dict(), or what it consists of"
        ) from error


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
        """Reads the bytes of a record."""
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
