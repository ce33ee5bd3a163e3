"""Tensors where they lie in files, some elements at a time; and trees of them, as a checkpoint holds them.

Legend: N numel of a tensor; a tensor's elements are in row-major order unless strides say otherwise.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import mmap
from collections.abc import Callable, Iterator, Mapping, Set
from typing import BinaryIO, NamedTuple, TypeAlias, cast

import torch

from ...checks import some
from ...errors import ConfigurationError, DamagedFileError, ShardkitError
from ...layout import Box, whole_box
from ...torch_seams.tensors import memory_of, narrowed, storage_order
from ...types import StateDict, Tree
from ..files.loading import Damage, read_into
from ..format.metadata import dotted

_LARGE = 1 << 16
BLOCK = 1 << 22  # bytes that are held at a time beside a tensor

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class FilePlace:
    """Tells where a part of a tensor lies.

    Attributes:
        offset: of its first byte in the file.
        strides: in elements, as a tensor has them; None: elements are in row-major order.
        crc: CRC-32 of these bytes, if that is known.
    """

    path: str
    offset: int
    strides: Shape | None = None
    crc: int | None = None


class StoredPart(NamedTuple):
    """A part of a tensor.

    Attributes:
        box: of the tensor; so many elements as it says come before at the place.
        where: finds the place; called when it is read.
    """

    box: Box
    where: Callable[[], FilePlace]


@dataclasses.dataclass(frozen=True, eq=False)
class StoredTensor:
    """A tensor of a checkpoint, which stays in its file until it is read.

    Attributes:
        shape, stored_dtype: as it is in the file.
        parts: which together are the tensor.
        dtype: as which it is handed out.
        identity: equal for names of the same tensor (tied weights); None where a file doesn't tell.
        value: the tensor itself where it had to be read already.
    """

    name: str
    shape: Shape
    stored_dtype: torch.dtype
    parts: tuple[StoredPart, ...] = ()
    dtype: torch.dtype = torch.float32
    identity: object = None
    value: torch.Tensor | None = None

    @property
    def numel(self) -> int:
        """Returns N."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def cast(self, dtype: torch.dtype) -> StoredTensor:
        """Returns the same tensor, handed out as another dtype."""
        return dataclasses.replace(self, dtype=dtype)

    def read(self) -> torch.Tensor:
        """Reads all of it, as it is stored: memory of one tensor, and a block."""
        return self._filled(whole_box(self.shape), compares=True) if self.value is None else self.value

    def read_rows(self, start: int, stop: int) -> torch.Tensor:
        """Reads rows of the first dimension; checksums of whole parts are not compared."""
        if self.value is not None:
            return self.value[start:stop]
        rows = Box((start, *(0,) * (len(self.shape) - 1)), (stop - start, *self.shape[1:]))
        return self._filled(rows, compares=False)

    def _filled(self, rows: Box, compares: bool) -> torch.Tensor:
        held = sum(part.box.numel for part in self.parts)
        if held < self.numel:  # nobody has written the others
            raise DamagedFileError(
                f"tensor {self.name!r}: the files hold {held} of its {self.numel} elements; the files of a rank are "
                "missing, or were not written to the end. Take an earlier checkpoint"
            )
        target = _empty(rows.sizes, self.stored_dtype)
        for part in self.parts:
            common = part.box.meet(rows)
            if common is None:
                continue
            place, skip = self._place(part), part.box.start
            if not compares:
                place = dataclasses.replace(place, crc=None)
            if common.sizes != part.box.sizes:
                skip += (common.offsets[0] - part.box.offsets[0]) * math.prod(part.box.sizes[1:])
            with _opened(place.path) as file:
                _Source(file, place, self.name).fill(narrowed(target, common, rows), skip)
        return target

    def slabs(self) -> Iterator[tuple[int, int]]:
        """Yields ranges of rows of about a block each; all of a tensor that can't be read in rows."""
        if not self.shape or self.numel == 0 or any(self._place(part).strides for part in self.parts):
            return
        step = max(1, BLOCK // max(1, self.numel // self.shape[0] * self.stored_dtype.itemsize))
        for start in range(0, self.shape[0], step):
            yield start, min(start + step, self.shape[0])

    def blocks(self) -> Iterator[memoryview]:
        """Yields the bytes of all elements in row-major order, as ``dtype``. A block is valid until the next."""
        yield from blocks_of(self.read(), self.dtype)

    def _place(self, part: StoredPart) -> FilePlace:
        try:
            return part.where()
        except (ValueError, OSError) as error:
            if isinstance(error, ShardkitError):
                raise
            raise DamagedFileError(f"tensor {self.name!r} can't be read: {error}") from error


def _empty(shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    """Makes memory that the system gets back at once: malloc keeps some tens of MB of what large tensors leave."""
    size = math.prod(shape) * dtype.itemsize
    if size < _LARGE:
        return torch.zeros(shape, dtype=dtype, device="cpu")
    try:
        return torch.frombuffer(mmap.mmap(-1, size), dtype=dtype).view(shape)
    except (OSError, OverflowError, ValueError) as error:
        raise DamagedFileError(f"a tensor of shape {shape} doesn't fit into memory ({error})") from None


def in_memory(name: str, value: torch.Tensor) -> StoredTensor:
    """Returns a tensor that was read already."""
    identity = None
    if value.numel() > 0:
        identity = ("memory", value.data_ptr(), tuple(value.shape), value.stride(), value.dtype)
    value = value.detach().cpu().contiguous()
    return StoredTensor(name, tuple(value.shape), value.dtype, (), value.dtype, identity, value)


def blocks_of(tensor: torch.Tensor, dtype: torch.dtype) -> Iterator[memoryview]:
    """Yields bytes of a contiguous tensor as another dtype; only a block is ever copied."""
    flat = tensor.reshape(-1)
    step = max(1, BLOCK // max(tensor.itemsize, dtype.itemsize))
    if dtype == tensor.dtype:
        for start in range(0, flat.numel(), step):
            yield memory_of(flat[start : start + step])
        return
    block = _empty((min(step, flat.numel()),), dtype)
    for start in range(0, flat.numel(), step):
        part = flat[start : start + step]
        yield memory_of(block[: part.numel()].copy_(part))


@contextlib.contextmanager
def _opened(path: str) -> Iterator[BinaryIO]:
    try:
        with open(path, "rb", buffering=0) as file:
            yield cast(BinaryIO, file)
    except OSError as error:  # by its own name: who writes meanwhile would take it for the target's
        raise DamagedFileError(f"{path} can't be read ({error.strerror or error})") from error


class _Source:
    def __init__(self, file: BinaryIO, place: FilePlace, name: str) -> None:
        self._file, self._place, self._name = file, place, name
        self._crc = None if place.crc is None else 0

    def fill(self, view: torch.Tensor, skip: int) -> None:
        """Reads a part, from a number of elements on; compares its checksum, where it is known."""
        self._file.seek(self._place.offset + skip * view.itemsize)
        if 0 in view.shape:
            return
        strides = self._place.strides
        if strides is not None and storage_order(view.shape, strides) is None:
            span = 1 + sum((n - 1) * s for n, s in zip(view.shape, strides, strict=True))
            flat = _empty((span,), view.dtype)
            self._into(flat)
            view.copy_(flat.as_strided(view.shape, strides))
            return
        if strides is not None and view.dim() > 0:
            view = view.permute(storage_order(view.shape, strides) or [])
        self._in_order(view)
        if self._crc != self._place.crc:
            raise DamagedFileError(
                f"{self._place.path}: tensor {self._name!r} has other bytes than were written (checksum "
                f"{self._crc:#010x}, expected {self._place.crc:#010x}). Take another copy of the file, or an earlier "
                "checkpoint"
            )

    def _in_order(self, view: torch.Tensor) -> None:
        """Fills a view in its own row-major order."""
        if view.is_contiguous():
            self._into(view)
        elif view.numel() * view.itemsize <= BLOCK:
            block = _empty(tuple(view.shape), view.dtype)
            self._into(block)
            view.copy_(block)
        else:
            row = view[0].numel() * view.itemsize
            step = max(1, BLOCK // row)
            for start in range(0, view.shape[0], step):
                self._in_order(view[start : start + step] if row <= BLOCK else view[start])

    def _into(self, tensor: torch.Tensor) -> None:
        try:
            self._crc = read_into(self._file, tensor, self._crc)
        except Damage:
            raise DamagedFileError(
                f"{self._place.path} ends in the middle of tensor {self._name!r}; take another copy of the file, "
                "or an earlier checkpoint"
            ) from None


Path: TypeAlias = tuple[object, ...]
"""Keys of dicts and indices of lists that lead to something."""

# Under which programs keep the model's state dict in a file.
_MODEL_KEYS = ("model", "state_dict", "model_state_dict", "model_state", "module", "net", "weights")
_OPTIMIZER_KEYS = (
    "optimizer",
    "optim",
    "optimizer_state_dict",
    "optimizer_state",
    "optimizers",
    "optimizer_states",
)


@dataclasses.dataclass
class Checkpoint:
    """A checkpoint that was opened. Nothing but its tables of contents was read.

    Attributes:
        path: as it was passed, or the step's folder that was chosen.
        kind: "shardkit", "dcp", "torch", "fairscale", "xla" or "hf".
        tree: dict of all that it holds.
        model_path: keys that lead to the model's state dict; none: the tree is the state dict.
        facts: what is known beside: step, world size, when it was written, ...
        left_out: what it holds that is not in the tree, in words.
    """

    path: str
    kind: str
    tree: StateDict
    model_path: Path = ()
    facts: dict[str, object] = dataclasses.field(default_factory=dict)
    left_out: list[str] = dataclasses.field(default_factory=list)

    @property
    def model(self) -> StateDict:
        """Returns the model's state dict by name."""
        return {dotted(path): value for path, value in leaves(at(self.tree, self.model_path))}

    @property
    def optimizer_path(self) -> Path | None:
        """Returns keys that lead to the optimizer's state dict, where there is one; frameworks keep a list of them."""
        for key in _OPTIMIZER_KEYS if self.model_path else ():
            value = self.tree.get(key)
            if isinstance(value, Mapping) and "param_groups" in value:
                return (key,)
            only = value[0] if isinstance(value, list) and len(value) == 1 else None
            if isinstance(only, Mapping) and "param_groups" in only:
                return (key, 0)
        return None

    def tensors(self) -> Iterator[tuple[str, StoredTensor]]:
        """Yields all tensors, under dotted names."""
        for path, value in leaves(self.tree):
            if isinstance(value, StoredTensor):
                yield dotted(path), value

    def values(self) -> Iterator[tuple[str, object]]:
        """Yields all that is no tensor."""
        for path, value in leaves(self.tree):
            if not isinstance(value, StoredTensor):
                yield dotted(path), value


def at(tree: Tree, path: Path) -> Tree:
    for key in path:
        tree = tree[key]
    return tree


def put(tree: Tree, path: Path, value: Tree) -> None:
    at(tree, path[:-1])[path[-1]] = value


def without_ties(tensors: Mapping[str, StoredTensor]) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """Returns each tensor under its first name, and the other names with the first."""
    kept: dict[str, StoredTensor] = {}
    shared: dict[str, str] = {}
    first: dict[object, str] = {}
    for name, tensor in tensors.items():
        is_known = tensor.identity is not None and tensor.numel > 0
        source = first.setdefault(tensor.identity, name) if is_known else name
        if source == name:
            kept[name] = tensor
        else:
            shared[name] = source
    return kept, shared


def leaves(tree: object, path: Path = (), whole: Set[Path] | None = None) -> Iterator[tuple[Path, object]]:
    """Yields tensors, and values without tensors in them, with their keys. A list of plain values is one value.

    Args:
        whole: paths of what is not taken apart; nor are tuples then, as torch's planner does.
    """
    if path in (whole or ()):
        yield path, tree
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from leaves(value, (*path, key), whole)
    elif (isinstance(tree, list) or (whole is None and isinstance(tree, tuple))) and _is_taken_apart(tree):
        for index, value in enumerate(tree):
            yield from leaves(value, (*path, index), whole)
    else:
        yield path, tree


def _is_taken_apart(values: list[object] | tuple[object, ...]) -> bool:
    return any(
        isinstance(v, Mapping | StoredTensor) or (isinstance(v, list | tuple) and _is_taken_apart(v))
        for v in values
    )


def mapped(tree: Tree, change: Callable[[Path, Tree], Tree], path: Path = ()) -> Tree:
    """Makes new containers of the same types and attributes (``_metadata`` of a state dict) with other leaves."""
    if type(tree) is tuple:
        return tuple(mapped(v, change, (*path, i)) for i, v in enumerate(tree))
    if not isinstance(tree, dict | list):
        return change(path, tree)
    made = copy.copy(tree)
    for key, value in list(tree.items() if isinstance(tree, dict) else enumerate(tree)):
        made[key] = mapped(value, change, (*path, key))
    return made


def _is_state_dict(value: object) -> bool:
    """Says whether these are names and tensors, with a few other values at most (``_extra_state``)."""
    if not isinstance(value, Mapping) or not all(isinstance(k, str) for k in value):
        return False
    tensors = sum(isinstance(v, StoredTensor) for v in value.values())
    return tensors > 0 and 2 * tensors >= len(value)


def find_model(tree: StateDict, key: str | None, where: str) -> Path:
    """Returns the keys that lead to the model's state dict.

    Args:
        key: what a user says it is ("a.b": below another one); None: known names are tried.
    """
    found: Tree
    if key is not None:
        found = tree
        path = (key,) if key in tree else tuple(key.split("."))
        for part in path:
            if not isinstance(found, Mapping) or part not in found:
                raise ConfigurationError(f"{where} has no {key!r}; its keys are {some(tree)}")
            found = found[part]
        return path
    for name in _MODEL_KEYS:
        found = tree.get(name)
        kinds = (StoredTensor, torch.Tensor)
        if isinstance(found, Mapping) and any(isinstance(value, kinds) for _, value in leaves(found)):
            return (name,)
    if _is_state_dict(tree):
        return ()
    held = [k for k, v in tree.items() if _is_state_dict(v)]
    if len(held) == 1:
        return (held[0],)
    raise ConfigurationError(
        f"{where}: none of its keys is known for a model's state dict ({some(tree)}); pass --model-key KEY"
    )


def without_layer(tree: StateDict) -> tuple[StateDict, str | None]:
    """Returns what is in the one key of a checkpoint, if the model's and the optimizer's are in there; and that key."""
    for key, value in tree.items() if len(tree) == 1 else ():
        if isinstance(value, dict) and any(isinstance(value.get(name), Mapping) for name in _MODEL_KEYS):
            return value, key
    return tree, None
