"""Compares two checkpoints of whatever kinds, name by name, some rows at a time; and one with its checksums."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import struct
import zipfile
from collections.abc import Iterator
from typing import BinaryIO, cast

import torch

from ...errors import ConfigurationError, DamagedFileError, ShardkitError
from ...types import Tree
from ..files.archive import View
from ..format import folders
from ..format.manifest import NAME as MANIFEST
from ..format.manifest import DamagedItem, Manifest, damages, read_manifest
from ..format.metadata import METADATA, Record, dotted, read_metadata
from ..rank_states import equal
from . import hugging_face
from .opening import files_of_ranks
from .stored import Checkpoint, StoredTensor, leaves
from .torch_files import read_torch_file


@dataclasses.dataclass(frozen=True)
class Difference:
    """A difference, under one name.

    Attributes:
        name: model's tensors begin with "model.".
        what: in words.
        max_abs: largest absolute difference of elements; None where values were not compared.
    """

    name: str
    what: str
    max_abs: float | None = None


@dataclasses.dataclass
class Comparison:
    """A comparison of two checkpoints.

    Attributes:
        differences: none, where all that was compared is the same to the bit.
        tensors: that were compared.
        not_compared: what only one of both has a place for.
    """

    differences: list[Difference] = dataclasses.field(default_factory=list)
    tensors: int = 0
    not_compared: list[str] = dataclasses.field(default_factory=list)


def compare(a: Checkpoint, b: Checkpoint, *, model_only: bool = False, tolerance: float = 0.0) -> Comparison:
    """Compares names, shapes, dtypes and values.

    Where one of both is a model's state dict alone, as all Hugging Face folders are, so much is compared.

    Args:
        model_only: compare no more than the models.
        tolerance: so much may elements differ.

    Raises:
        DamagedFileError: of either; names file and tensor.
    """
    result = Comparison()
    if not model_only and bool(a.model_path) != bool(b.model_path):
        whole, bare = (a, b) if a.model_path else (b, a)
        others = [str(k) for k in whole.tree if k != whole.model_path[0]]
        if others:
            result.not_compared.append(f"{', '.join(others)}: {bare.path} holds a model alone")
        model_only = True
    left, right = _by_name(a, model_only), _by_name(b, model_only)
    ranks = [set(c.tree["rank_states"]) if "rank_states" in c.tree else set() for c in (a, b)]
    for rank in () if model_only else sorted(ranks[0] ^ ranks[1], key=str):
        result.not_compared.append(f"rank_states.{rank}: one of both was saved by fewer ranks")
        for names in (left, right):
            for name in [n for n in names if n.startswith(f"rank_states.{rank}.")]:
                del names[name]
    for name in [*left, *(n for n in right if n not in left)]:
        if name not in right or name not in left:
            result.differences.append(Difference(name, f"only in {a.path if name in left else b.path}"))
            continue
        x, y = left[name], right[name]
        result.tensors += isinstance(x, StoredTensor)
        result.differences += _differences(name, x, y, tolerance)
    return result


def _by_name(checkpoint: Checkpoint, model_only: bool) -> dict[str, object]:
    found = {f"model.{name}": value for name, value in checkpoint.model.items()}
    if not model_only and checkpoint.model_path:
        inside = len(checkpoint.model_path)
        for path, value in leaves(checkpoint.tree):
            if path[:inside] != checkpoint.model_path:
                found[dotted(path)] = value
    return found


def _differences(name: str, x: Tree, y: Tree, tolerance: float) -> Iterator[Difference]:
    if isinstance(x, StoredTensor) != isinstance(y, StoredTensor):
        yield Difference(name, "a tensor in one, and none in the other")
    elif not isinstance(x, StoredTensor):
        if not equal(x, y):
            yield Difference(name, f"{short(x)} and {short(y)}")
    elif x.shape != y.shape:
        yield Difference(name, f"shapes {list(x.shape)} and {list(y.shape)}")
    else:
        found = _Found()
        found.see(x, y)
        if x.dtype != y.dtype:
            kinds = f"{short_dtype(x.dtype)} and {short_dtype(y.dtype)}"
            values = "values are equal" if found.count == 0 else f"max. difference {found.max_abs:.3g}"
            yield Difference(name, f"dtypes {kinds}, {values}", found.max_abs)
        elif found.bits and not found.max_abs <= tolerance:
            what = f"{found.count} of {x.numel} elements, max. {found.max_abs:.3g}"
            yield Difference(name, what, found.max_abs)
        elif found.bits and tolerance == 0.0:
            what = "equal values with other bits (signs of zeros, kinds of NaN)"
            yield Difference(name, what, found.max_abs)


def same_bits(x: StoredTensor, y: StoredTensor) -> bool:
    """Says whether two tensors of one shape and dtype have the same bytes."""
    found = _Found()
    found.see(x, y)
    return not found.bits


class _Found:
    """The differences of a pair of tensors so far."""

    def __init__(self) -> None:
        self.bits = False
        self.count = 0
        self.max_abs = 0.0

    def see(self, x: StoredTensor, y: StoredTensor) -> None:
        """Compares them, in rows where that can be."""
        slabs: list[tuple[int, int] | None] = [*x.slabs()] if [*y.slabs()] else []
        for rows in slabs or [None]:
            a, b = (t.read() if rows is None else t.read_rows(*rows) for t in (x, y))
            self._pair(a.to(x.dtype).reshape(-1), b.to(y.dtype).reshape(-1))

    def _pair(self, a: torch.Tensor, b: torch.Tensor) -> None:
        if a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
            return
        self.bits = True
        wide = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
        a, b = a.to(wide), b.to(wide)
        same = (a == b) | (a.isnan() & b.isnan())
        unequal = int(same.numel() - same.sum())
        if unequal:
            self.count += unequal
            largest = float((a - b).abs().masked_fill(same, 0.0).max())
            is_nan = math.isnan(largest) or math.isnan(self.max_abs)
            self.max_abs = largest if is_nan else max(self.max_abs, largest)


def short(value: object) -> str:
    """Returns the beginning of its text, for a line."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def short_dtype(dtype: torch.dtype) -> str:
    """Names a dtype without torch's name in front."""
    return str(dtype).removeprefix("torch.")


# ------------------------------------------------------------ a checkpoint and its checksums
# Those of shardkit.json, or those that the files have.
@dataclasses.dataclass
class Verified:
    """A report on one checkpoint.

    Attributes:
        path: of one checkpoint.
        damages: none, where all that could be compared is as it was written.
        files, items, bytes: that were looked at.
        limits: what could not be compared, in words.
    """

    path: str
    damages: list[DamagedItem] = dataclasses.field(default_factory=list)
    files: int = 0
    items: int = 0
    bytes: int = 0
    limits: list[str] = dataclasses.field(default_factory=list)

    @contextlib.contextmanager
    def noting(
        self, file: str, name: str | None = None, kind: type[ShardkitError] = ShardkitError
    ) -> Iterator[None]:
        """Takes an error of this kind, inside, for a damage, of a file or of what has a name in it."""
        try:
            yield
        except kind as error:
            self.damages.append(DamagedItem(file, name, str(error)))

    def look_at(self, path: str, items: int) -> None:
        """Takes note of a file."""
        self.files += 1
        self.items += items
        self.bytes += os.path.getsize(path) if os.path.exists(path) else 0


def verify(path: str) -> list[Verified]:
    """Verifies each checkpoint at a path; of a folder of steps, all that were complete when they were written.

    Raises:
        ConfigurationError: there is none.
    """
    is_one = any(os.path.exists(os.path.join(path, n)) for n in (METADATA, MANIFEST))
    if not is_one and folders.steps_in(path):
        complete = folders.complete(path)
        if not complete:
            raise ConfigurationError(f"{path} has no complete step: each folder lacks its {MANIFEST}")
        return [_of_shardkit(step) for step in complete.values()]
    if os.path.exists(os.path.join(path, MANIFEST)):
        return [_of_shardkit(path)]
    if os.path.exists(os.path.join(path, METADATA)):
        return [_of_dcp(path)]
    if os.path.exists(path) and hugging_face.weight_files(path):
        return [_of_hugging_face(path)]
    return [_of_torch_files(path, files_of_ranks(path))]


# ------------------------------------------------------------ with shardkit.json
def _of_shardkit(folder: str) -> Verified:
    result = Verified(folder)
    try:
        manifest = read_manifest(folder)
    except DamagedFileError as error:
        # its checksums of other files may be what is damaged
        result = _of_dcp(folder)
        result.damages.insert(0, DamagedItem(MANIFEST, None, str(error)))
        return result
    result.look_at(os.path.join(folder, MANIFEST), 0)
    for name, stored in manifest.files.items():
        result.look_at(os.path.join(folder, name), len(stored.items))
    result.damages += damages(folder, manifest)
    if not result.damages:
        result.damages += _not_listed(folder, manifest)
    return result


def _not_listed(folder: str, manifest: Manifest) -> Iterator[DamagedItem]:
    """Finds records in the table of contents that were not compared."""
    if METADATA not in manifest.files:
        yield DamagedItem(MANIFEST, None, f"doesn't name {METADATA}")
        return
    known = {
        (name, item.name, item.offset, item.length) for name, f in manifest.files.items() for item in f.items
    }
    for record in read_metadata(folder).records():
        if (record.file, record.name, record.offset, record.length) not in known:
            yield DamagedItem(
                record.file, record.name, f"is in {METADATA}, and {MANIFEST} has no checksum of it"
            )


# ------------------------------------------------------------ without
def _of_dcp(folder: str) -> Verified:
    result = Verified(folder)
    result.limits.append(
        f"without a whole {MANIFEST}, compared is the CRC-32 that torch.save leaves with each tensor and object; "
        f"{METADATA} itself, and bytes between tensors, have none"
    )
    records: list[Record] = []
    with result.noting(METADATA):
        records = sorted(read_metadata(folder).records())
        result.look_at(os.path.join(folder, METADATA), 0)
    for name in sorted({record.file for record in records}):
        result.look_at(os.path.join(folder, name), sum(record.file == name for record in records))
    for record in records:
        with result.noting(record.file, record.name, DamagedFileError):
            record.check(folder)
            _compare(folder, record)
    return result


def _compare(folder: str, record: Record) -> None:
    """Compares all that is in the zip that torch.save wrote; nothing of it is interpreted."""
    with open(os.path.join(folder, record.file), "rb") as file:
        try:
            archive = zipfile.ZipFile(cast(BinaryIO, View(file, record.offset, record.length)))
            if any(entry.CRC for entry in archive.infolist()):  # torch can be told to leave them out
                bad = archive.testzip()
                if bad is not None:
                    raise DamagedFileError(f"has other bytes than were written (its record {bad})")
        except (zipfile.BadZipFile, RuntimeError, ValueError, EOFError, OSError, struct.error) as error:
            if isinstance(error, DamagedFileError):
                raise
            raise DamagedFileError(f"is no file of torch.save any more ({error})") from None


def _of_torch_files(path: str, files: list[str]) -> Verified:
    result = Verified(path)
    result.limits.append("compared is the CRC-32 that torch.save leaves with each tensor")
    for file in files:
        tensors, name = [], os.path.basename(file)
        with result.noting(name, None, DamagedFileError):
            tensors = [v for _, v in leaves(read_torch_file(file)) if isinstance(v, StoredTensor)]
        result.look_at(file, len(tensors))
        for tensor in tensors:
            with result.noting(name, tensor.name, DamagedFileError):
                tensor.read()
    return result


def _of_hugging_face(path: str) -> Verified:
    result = Verified(path)
    result.limits.append("safetensors files have no checksums: compared are sizes, and names with the index")
    for file in hugging_face.weight_files(path):
        name = os.path.basename(file)
        with result.noting(name):
            if not os.path.exists(file):
                result.damages.append(DamagedItem(name, None, "is missing"))
            elif file.endswith(".safetensors"):
                result.look_at(file, len(hugging_face.read_safetensors(file)))
            else:
                result.damages += _of_torch_files(path, [file]).damages
    if not result.damages:
        with result.noting(hugging_face.INDEX):
            hugging_face.read_weights(path)
    return result
