"""Folders of torch's distributed checkpoints (DCP), written by whatever: shardkit, FSDP2, ``dcp.save``."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from typing import NamedTuple

import torch

from ..errors import ConfigurationError, DamagedFileError, ShardkitError
from ..types import StateDict, Tree
from .metadata import METADATA, Bytes, Index, Metadata, TensorFacts, read_metadata
from .stored import Box, Place, Shape, StoredTensor
from .torch_files import Contents, held
from .trees import replaced


class Item(NamedTuple):
    """A piece of a data file.

    Attributes:
        name: flat name of what it belongs to.
        offsets: of a box of a tensor; None: it is an object.
        file: path of the file.
        start, length: of the piece, in bytes.
    """

    name: str
    offsets: Shape | None
    file: str
    start: int
    length: int


def items_of(folder: str, metadata: Metadata) -> Iterator[Item]:
    """All pieces of all files.

    Raises:
        DamagedFileError: the table of contents names files elsewhere.
        ConfigurationError: pieces are compressed, or encrypted.
    """
    for index, facts in (metadata.get("storage_data") or {}).items():
        if not isinstance(index, Index):
            raise DamagedFileError(f"{os.path.join(folder, METADATA)}: an item without a name")
        name, relative = index.get("fqn"), facts.get("relative_path")
        if (
            not isinstance(relative, str)
            or os.path.basename(relative) != relative
            or relative in ("", ".", "..")
        ):
            raise DamagedFileError(
                f"{os.path.join(folder, METADATA)}: {name!r} is said to lie in {relative!r}, which is no file of the "
                "folder"
            )
        if facts.get("transform_descriptors"):
            raise ConfigurationError(
                f"{folder}: {name!r} was written through extensions ({facts.get('transform_descriptors')}), which are "
                "not read here; load it with torch.distributed.checkpoint and save it without them"
            )
        offsets = index.get("offset")
        start, length = facts.get("offset"), facts.get("length")
        if not all(type(v) is int and v >= 0 for v in (start, length)):
            raise DamagedFileError(f"{os.path.join(folder, METADATA)}: {name!r} lies nowhere")
        yield Item(
            str(name),
            None if offsets is None else tuple(offsets),
            os.path.join(folder, relative),
            start,
            length,
        )


def read_folder(folder: str, trust_pickle: bool = False) -> StateDict:
    """What a folder holds, nested as it was saved.

    Args:
        trust_pickle: let torch run what objects in it say.

    Raises:
        UntrustedFileError, DamagedFileError: the table of contents, or an object, can't be read as data.
        ConfigurationError: see :func:`items_of`.
    """
    metadata = read_metadata(folder)
    try:
        return _tree(folder, metadata, trust_pickle)
    except (TypeError, AttributeError, KeyError, IndexError, ValueError) as error:
        if isinstance(error, ShardkitError):
            raise
        raise DamagedFileError(
            f"{os.path.join(folder, METADATA)} makes no sense ({type(error).__name__}: {error}); take another copy, or "
            "an earlier checkpoint"
        ) from None


def _tree(folder: str, metadata: Metadata, trust_pickle: bool) -> StateDict:
    held: dict[str, list[Item]] = {}
    for item in items_of(folder, metadata):
        held.setdefault(item.name, []).append(item)
    paths = metadata.get("planner_data")
    tree: StateDict = {}
    for name, facts in metadata.get("state_dict_metadata").items():
        path = paths.get(name, (name,)) if isinstance(paths, dict) else (name,)
        if isinstance(facts, TensorFacts):
            value: Tree = _tensor(name, facts, held.get(name, []))
        elif isinstance(facts, Bytes):
            value = _object(name, held.get(name, []), trust_pickle)
        else:
            raise DamagedFileError(f"{os.path.join(folder, METADATA)}: {name!r} is neither tensor nor object")
        _set(tree, path, value)
    return tree


def _tensor(name: str, facts: TensorFacts, items: list[Item]) -> StoredTensor:
    dtype, size = facts.get("properties").values[0], tuple(facts.get("size"))
    if not isinstance(dtype, torch.dtype):
        raise DamagedFileError(f"tensor {name!r} has no dtype in the table of contents")
    by_offsets = {item.offsets: item for item in items}
    parts = []
    for chunk in facts.get("chunks"):
        offsets, sizes = tuple(chunk.get("offsets")), tuple(chunk.get("sizes"))
        item = by_offsets.get(offsets)
        if item is not None:
            parts.append(Box(offsets, sizes, _Chunk(item, sizes, dtype)))
    return StoredTensor(name, size, dtype, tuple(parts), dtype)


class _Chunk:
    """Finds the elements of a chunk: it is a file of ``torch.save`` within the file."""

    def __init__(self, item: Item, sizes: Shape, dtype: torch.dtype) -> None:
        self._item, self._sizes, self._dtype = item, sizes, dtype
        self._place: Place | None = None

    def __call__(self) -> Place:
        if self._place is None:
            self._place = self._find()
        return self._place

    def _find(self) -> Place:
        item = self._item
        check_inside(item)
        found = Contents(item.file, item.start, item.length, f"tensor {item.name!r}").tree()
        if not isinstance(found, StoredTensor) or (found.shape, found.stored_dtype) != (
            self._sizes,
            self._dtype,
        ):
            raise DamagedFileError(
                f"{item.file}: tensor {item.name!r} is another one than the table of contents says; take an earlier "
                "checkpoint"
            )
        return found.parts[0].where()


def _object(name: str, items: list[Item], trust_pickle: bool) -> Tree:
    if not items:
        raise DamagedFileError(
            f"{name!r} is in the table of contents and in no file; take an earlier checkpoint"
        )
    item = items[0]
    check_inside(item)
    if trust_pickle:
        with open(item.file, "rb") as file:
            file.seek(item.start)
            value = torch.load(io.BytesIO(file.read(item.length)), map_location="cpu", weights_only=False)
            return replaced(value, held)
    return replaced(Contents(item.file, item.start, item.length, repr(name)).values(), held)


def check_inside(item: Item) -> None:
    """Refuses an item whose file is missing, or ends before.

    Raises:
        DamagedFileError: it does.
    """
    try:
        size = os.path.getsize(item.file)
    except FileNotFoundError:
        raise DamagedFileError(
            f"{item.file} is missing, and {item.name!r} lies in it; take another copy, or an earlier checkpoint"
        ) from None
    if item.start + item.length > size:
        raise DamagedFileError(
            f"{item.file} is cut off: it has {size} bytes, and {item.name!r} ends at {item.start + item.length}; take "
            "another copy, or an earlier checkpoint"
        )


def _set(tree: StateDict, path: tuple[object, ...], value: Tree) -> None:
    """Puts a value in nested dicts (keys are texts) and lists (keys are numbers)."""
    holder: Tree = tree
    for key, following in zip(path, (*path[1:], None), strict=True):
        made: Tree = value if following is None else ({} if type(following) is str else [])
        if isinstance(holder, list):
            if type(key) is not int or not 0 <= key <= 1 << 20:
                raise DamagedFileError(f"{path} in the table of contents leads nowhere")
            holder += [None] * (key + 1 - len(holder))
            if following is None or holder[key] is None:
                holder[key] = made
            holder = holder[key]
        else:
            if following is None:
                holder[key] = made
            holder = holder.setdefault(key, made)
            if following is not None and not isinstance(holder, dict | list):
                raise DamagedFileError(f"{path} in the table of contents leads through a value")
