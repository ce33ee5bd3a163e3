"""Opens a checkpoint of whatever kind: finds out which it is, and reads its tables of contents.

And compares two checkpoints of whatever kinds, name by name, some rows at a time; and one with its checksums.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import glob
import io
import math
import os
import struct
import zipfile
from collections.abc import Iterator
from typing import BinaryIO, cast

import torch

from ...errors import ConfigurationError, DamagedFileError, ShardkitError
from ...torch_seams.tensors import differing
from ...types import StateDict, Tree
from ..files.loading import View
from ..format import folders
from ..format.folders import latest
from ..format.manifest import NAME as MANIFEST
from ..format.manifest import DamagedItem, Manifest, damages, read_manifest, refuse_damage
from ..format.metadata import METADATA, Chunk, Record, dotted, read_metadata
from ..rank_states import equal
from . import hugging_face, rank_files
from .stored import Checkpoint, FilePlace, StoredPart, StoredTensor, find_model, leaves, mapped, without_layer
from .torch_files import Contents, held, read_torch_file


def read_folder(folder: str, trust_pickle: bool = False) -> StateDict:
    """Reads what a folder holds, nested as it was saved.

    Args:
        trust_pickle: let torch run what objects in it say.
    """
    table, values = read_metadata(folder), {}
    for name in table.paths:
        if name in table.tensors:
            dtype, shape, chunks = table.tensors[name]
            places = [functools.cache(functools.partial(_place, folder, chunk, dtype)) for chunk in chunks]
            parts = tuple(StoredPart(c.box, place) for c, place in zip(chunks, places, strict=True))
            values[name] = StoredTensor(name, tuple(shape), dtype, parts, dtype)
        else:
            values[name] = _object(folder, table.objects[name], trust_pickle)
    try:
        return table.nested(values)
    except ValueError as error:
        raise DamagedFileError(
            f"{os.path.join(folder, METADATA)} makes no sense ({error}); take another copy, or an earlier checkpoint"
        ) from None


def _place(folder: str, chunk: Chunk, dtype: torch.dtype) -> FilePlace:
    """Finds the elements of a chunk: it is a file of ``torch.save`` within the file."""
    record, path = chunk.record, os.path.join(folder, chunk.record.file)
    record.check(folder)
    found = Contents(path, record.offset, record.length, f"tensor {record.name!r}").tree()
    if not isinstance(found, StoredTensor) or (found.shape, found.stored_dtype) != (chunk.box.sizes, dtype):
        raise DamagedFileError(
            f"{path}: tensor {record.name!r} is another one than the table of contents says; take an earlier "
            "checkpoint"
        )
    return found.parts[0].where()


def _object(folder: str, record: Record, trust_pickle: bool) -> Tree:
    record.check(folder)
    path = os.path.join(folder, record.file)
    if trust_pickle:
        with open(path, "rb") as file:
            file.seek(record.offset)
            value = torch.load(io.BytesIO(file.read(record.length)), map_location="cpu", weights_only=False)
            return mapped(value, held)
    return mapped(Contents(path, record.offset, record.length, repr(record.name)).values(), held)


_ENDINGS = (".pt", ".pth", ".bin", ".ckpt", ".tar")


def open_checkpoint(path: str, *, model_key: str | None = None, trust_pickle: bool = False) -> Checkpoint:
    """Opens a checkpoint of any kind; tensors stay in their files.

    Args:
        path: folder of a step or of steps (the latest is taken), DCP or Hugging Face folder, file of ``torch.save`` or
            safetensors, folder or pattern of the files of all ranks.
        model_key: key of the model's state dict, where it is not one of the usual ones.
        trust_pickle: run what files say; see :func:`shardkit.load`.

    Raises:
        ConfigurationError: it is none of these, or something of it is missing.
        UntrustedFileError, DamagedFileError: see :func:`shardkit.load`.
    """
    if os.path.isdir(path) and not os.path.exists(os.path.join(path, METADATA)):
        path = latest(path) or path
    if os.path.exists(os.path.join(path, METADATA)):
        return _of_folder(path, model_key, trust_pickle)
    if os.path.exists(path) and hugging_face.weight_files(path):
        weights, left_out = hugging_face.read_weights(path, trust_pickle), []
        if "lm_head.weight" not in weights and hugging_face.ties_without_saying(path):
            left_out.append(
                "names of tied weights that the files don't have (config.json: tie_word_embeddings); tie_weights() of "
                "the model, or load_state_dict(strict=False), brings them back"
            )
        return Checkpoint(path, "hf", weights, left_out=left_out)
    return _of_files(path, files_of_ranks(path), model_key, trust_pickle)


def files_of_ranks(path: str) -> list[str]:
    """Lists the files of torch.save that a path is: itself, those in the folder, or those that match a pattern."""
    if os.path.isfile(path):
        return [path]
    if not os.path.exists(path):
        matching = rank_files.in_natural_order(glob.glob(path))
        if not matching:
            raise ConfigurationError(f"there is no {path}")
        return matching
    files = [
        os.path.join(path, n) for n in os.listdir(path) if n.endswith(_ENDINGS) and not n.startswith(".")
    ]
    if files:
        return rank_files.in_natural_order(files)
    raise ConfigurationError(
        f"{path} is no checkpoint: it has no complete step-NNNNNNNN folder, no {METADATA} (torch's distributed "
        f"checkpoint), no *.safetensors, and no files of ranks ({', '.join(_ENDINGS)})"
    )


def _of_folder(path: str, model_key: str | None, trust_pickle: bool) -> Checkpoint:
    facts: dict[str, object] = {}
    kind = "dcp"
    if os.path.exists(os.path.join(path, MANIFEST)):
        try:
            manifest = read_manifest(path)
            if METADATA not in manifest.files:
                raise DamagedFileError(f"{path}: its {MANIFEST} doesn't name {METADATA}")
            refuse_damage(path, manifest, [METADATA])  # tensors have a CRC-32 each, which is compared later
        except DamagedFileError as error:
            raise DamagedFileError(f"{error}; shardkit ckpt verify {path} tells more") from None
        facts, kind = manifest.facts, "shardkit"
    return _with_model(path, kind, read_folder(path, trust_pickle), model_key, facts)


def _with_model(
    path: str, kind: str, tree: StateDict, model_key: str | None, facts: dict[str, object]
) -> Checkpoint:
    left_out = []
    if model_key is None:
        tree, layer = without_layer(tree)
        if layer is not None:
            left_out.append(f"the key {layer!r} around everything")
    return Checkpoint(path, kind, tree, find_model(tree, model_key, path), facts, left_out)


def _of_files(path: str, files: list[str], model_key: str | None, trust_pickle: bool) -> Checkpoint:
    trees = [read_torch_file(file, trust_pickle) for file in files]
    kinds = {rank_files.kind_of(tree) for tree in trees}
    if len(kinds) > 1:
        raise ConfigurationError(
            f"{path} has files of ranks and others; pass a pattern ('folder/rank*.pth') that has the ranks' alone"
        )
    if (kind := kinds.pop()) is not None:
        model, world_size, others = rank_files.read_rank_files(files, trees, kind)
        left_out = [f"{key!r} in the files of ranks" for key in others]
        return Checkpoint(path, kind, model, (), {"world_size": world_size}, left_out)
    if len(files) > 1:
        raise ConfigurationError(
            f"{path} has {len(files)} files that each are a checkpoint; pass one of them"
        )
    if not isinstance(trees[0], dict):
        raise ConfigurationError(f"{files[0]} holds a {type(trees[0]).__name__}, and a checkpoint is a dict")
    return _with_model(files[0], "torch", trees[0], model_key, {})


# ------------------------------------------------------------ comparing
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
        same, count, most = compared(x, y)
        if x.dtype != y.dtype:
            kinds = f"{x.dtype} and {y.dtype}".replace("torch.", "")
            values = "values are equal" if count == 0 else f"max. difference {most:.3g}"
            yield Difference(name, f"dtypes {kinds}, {values}", most)
        elif not same and not most <= tolerance:
            yield Difference(name, f"{count} of {x.numel} elements, max. {most:.3g}", most)
        elif not same and tolerance == 0.0:
            yield Difference(name, "equal values with other bits (signs of zeros, kinds of NaN)", most)


def compared(x: StoredTensor, y: StoredTensor) -> tuple[bool, int, float]:
    """Compares them, in rows where that can be: are all bits equal, how many elements differ, and by how much?"""
    same, count, most = True, 0, 0.0
    slabs: list[tuple[int, int] | None] = [*x.slabs()] if [*y.slabs()] else []
    for rows in slabs or [None]:
        a, b = (t.read() if rows is None else t.read_rows(*rows) for t in (x, y))
        a, b = a.to(x.dtype).reshape(-1), b.to(y.dtype).reshape(-1)
        if a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
            continue
        unequal, largest = differing(a, b)
        same, count = False, count + unequal
        if not math.isnan(most):
            most = largest if math.isnan(largest) else max(most, largest)
    return same, count, most


def short(value: object) -> str:
    """Returns the beginning of its text, for a line."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


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
    known = {Record(file, i.offset, i.length, i.name) for file, f in manifest.files.items() for i in f.items}
    why = f"is in {METADATA}, and {MANIFEST} has no checksum of it"
    for record in read_metadata(folder).records():
        if record not in known:
            yield DamagedItem(record.file, record.name, why)


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
            # torch can be told to leave them out
            has_checksums = any(entry.CRC for entry in archive.infolist())
            bad = archive.testzip() if has_checksums else None
        except (zipfile.BadZipFile, RuntimeError, ValueError, EOFError, OSError, struct.error) as error:
            raise DamagedFileError(f"is no file of torch.save any more ({error})") from None
    if bad is not None:
        raise DamagedFileError(f"has other bytes than were written (its record {bad})")


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
