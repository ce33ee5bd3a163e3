"""Reads and writes Hugging Face's folders: safetensors files with an index; reads the older ones of ``torch.save``."""

from __future__ import annotations

import glob
import json
import math
import os
import shutil
import struct
from collections.abc import Iterable, Mapping, Sequence

import torch

from ...errors import ConfigurationError, DamagedFileError, ShardkitError
from ...layout import whole_box
from ...types import StateDict, Tree
from .stored import BLOCK, FilePlace, StoredPart, StoredTensor, without_ties
from .torch_files import read_torch_file

INDEX = "model.safetensors.index.json"
_OLD_INDEX = "pytorch_model.bin.index.json"
_HEADER_LIMIT = 100_000_000  # bytes, as in safetensors
_NOTES = "__metadata__"  # what is no tensor in a table
_CHUNKS = "DCP_SHARDING_INFO"  # torch's HuggingFaceStorageWriter notes here which box of a tensor a file has

_SIZES = {"float": (16, 32, 64), "int": (8, 16, 32, 64), "uint": (8, 16, 32, 64)}
DTYPES = {f"{k[0].upper()}{n}": getattr(torch, f"{k}{n}") for k, sizes in _SIZES.items() for n in sizes}
DTYPES |= {"BF16": torch.bfloat16, "BOOL": torch.bool, "C64": torch.complex64}
DTYPES |= {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}


def weight_files(path: str) -> list[str]:
    """Lists the files with weights of a folder (or the one file that is passed); none: it is no such folder."""
    if os.path.isfile(path):
        return [path] if path.endswith(".safetensors") else []
    index = _index_in(path)
    if index is not None:
        return [os.path.join(path, name) for name in sorted(set(_index(index)[0].values()))]
    found = sorted(glob.glob(os.path.join(glob.escape(path), "*.safetensors")))
    return found or [p for p in [os.path.join(path, "pytorch_model.bin")] if os.path.isfile(p)]


def _index_in(folder: str) -> str | None:
    paths = [os.path.join(folder, name) for name in (INDEX, _OLD_INDEX)]
    return next(filter(os.path.isfile, paths), None)


def _index(path: str) -> tuple[dict[str, str], dict[str, object]]:
    """Returns the file of each name, and what is noted beside."""
    with open(path, encoding="utf-8") as file:
        try:
            found = json.load(file)
            names, notes = dict(found["weight_map"]), dict(found.get("metadata") or {})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DamagedFileError(f"{path} is no index of files ({error})") from None
    if not all(isinstance(v, str) and os.path.basename(v) == v for v in names.values()):
        raise DamagedFileError(f"{path} names files outside of its folder")
    return names, notes


def read_weights(path: str, trust_pickle: bool = False) -> StateDict:
    """Reads the state dict in all files."""
    found: StateDict = {}
    for file in weight_files(path):
        if not os.path.isfile(file):
            raise DamagedFileError(
                f"{file} is missing, and the index names it; take another copy of the folder"
            )
        if file.endswith(".safetensors"):
            found.update(read_safetensors(file))
        else:
            found.update(read_torch_file(file, trust_pickle))
    index = _index_in(path)
    if index is not None:
        names, notes = _index(index)
        _add_tied(found, notes)
        lost = sorted(set(names) - set(found))
        if lost:
            raise DamagedFileError(f"{index} names {lost[0]!r} ({len(lost)} in all), which no file has")
    return found


def read_safetensors(path: str) -> StateDict:
    """Reads the tensors of one file; a name that is noted as another one's (tied weights) is that one."""
    header, start = read_header(path)
    notes = header.pop(_NOTES, None) or {}
    if _holds_parts(notes):
        raise ConfigurationError(
            f"{path} holds parts of tensors, as torch's HuggingFaceStorageWriter leaves them; put them together with "
            "torch.distributed.checkpoint.HuggingFaceStorageWriter(enable_consolidation=True)"
        )
    found: StateDict = {name: _tensor(path, name, facts, start) for name, facts in header.items()}
    _add_tied(found, notes)
    return found


def _add_tied(found: StateDict, notes: Mapping[str, object]) -> None:
    """Adds names that are noted as another one's: huggingface_hub writes tied weights once."""
    for name, source in notes.items():
        if isinstance(source, str) and source in found and name not in found:
            found[name] = found[source]


def ties_without_saying(path: str) -> bool:
    """Says whether the model of a folder ties weights by its configuration, of which files have one name alone."""
    try:
        with open(os.path.join(path, "config.json"), encoding="utf-8") as file:
            return bool(json.load(file).get("tie_word_embeddings"))
    except (OSError, ValueError, AttributeError):
        return False


def read_header(path: str) -> tuple[dict[str, Tree], int]:
    """Reads the table of contents; returns where the bytes behind it begin, too."""
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        head = file.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else size
        if length > min(_HEADER_LIMIT, size - 8):
            raise DamagedFileError(f"{path} is no safetensors file, or its header is cut off or above 100 MB")
        try:
            header = json.loads(file.read(length))
            facts = [v for k, v in header.items() if k != _NOTES]
            end = max((f["data_offsets"][1] for f in facts), default=0)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise DamagedFileError(f"{path}: its header makes no sense ({error})") from None
    if size != 8 + length + end:
        raise DamagedFileError(
            f"{path} has {size} bytes, and its header says {8 + length + end}; take another copy of the file"
        )
    return header, 8 + length


def _tensor(path: str, name: str, facts: Tree, start: int) -> StoredTensor:
    try:
        dtype, shape = DTYPES.get(facts["dtype"]), tuple(facts["shape"])
        begin, end = facts["data_offsets"]
        if dtype is None:
            raise ConfigurationError(
                f"{path}: {name!r} is of dtype {facts['dtype']}, which torch doesn't have"
            )
        if not all(type(n) is int and n >= 0 for n in shape):
            raise ValueError("its shape is no shape")
        numel = math.prod(shape)
        if end - begin != numel * dtype.itemsize or begin < 0:
            raise ValueError(f"it has {end - begin} bytes, expected {numel * dtype.itemsize}")
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, ConfigurationError):
            raise
        raise DamagedFileError(f"{path}: {name!r}: {error}") from None
    place = FilePlace(path, start + begin)
    part = StoredPart(whole_box(shape), lambda: place)
    return StoredTensor(name, shape, dtype, (part,), dtype, (path, begin, end, shape))


def _holds_parts(notes: dict[str, str]) -> bool:
    try:
        facts = json.loads(notes.get(_CHUNKS, "{}"))
        return any(any(f["saved_offsets"]) for f in facts.values())
    except (ValueError, KeyError, TypeError, AttributeError):  # notes of another form may say anything
        return True


_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_WRAPPERS = ("module.", "_orig_mod.")  # what DDP, ShardedDDP and torch.compile put in front of all names


def without_wrappers(model: StateDict) -> tuple[StateDict, list[str]]:
    """Removes what a wrapper put in front of all names; returns what that was, too."""
    removed = []
    while model and (found := next((w for w in _WRAPPERS if all(n.startswith(w) for n in model)), None)):
        removed.append(found)
        model = {name.removeprefix(found): value for name, value in model.items()}
    return model, removed


def write_hugging_face(
    folder: str, model: StateDict, max_shard_size: int, files_from: str | None
) -> list[str]:
    """Writes the files; returns what a user should know.

    Args:
        folder: empty.
        model: its state dict; what is no tensor is left out.
        max_shard_size: in bytes; a file is larger only where one tensor is.
        files_from: a folder with configuration and tokenizer, which are copied.
    """
    notes = []
    others = [name for name, value in model.items() if not isinstance(value, StoredTensor)]
    if others:
        notes.append(f"left out, since safetensors files hold tensors alone: {', '.join(sorted(others))}")
    tensors, shared = without_ties({n: v for n, v in model.items() if isinstance(v, StoredTensor)})
    notes += [f"{name} is tied to {kept}: written once" for name, kept in shared.items()]
    files = SafetensorsFiles(folder, max_shard_size, shared)
    for name, tensor in sorted(tensors.items(), key=lambda one: -one[1].dtype.itemsize):
        files.add(name, tensor.dtype, tensor.shape, tensor.blocks())
    files.finish()
    if files_from is not None:
        notes += _copy_others(folder, files_from, tensors)
    return notes


def check_shard_size(most: object) -> None:
    """Refuses what is no number of bytes of a file."""
    if not isinstance(most, int | float) or not most > 0:
        raise ConfigurationError(
            f"max_shard_size={most!r}: it has to be a number of bytes above 0, as 5 * 10**9"
        )


class SafetensorsFiles:
    """Writes tensors to files of a folder as they come, and holds none of them.

    A file begins with the table of all its tensors, those of the largest elements first, so that each begins at a
    multiple of its elements' size. So tensors are written aside, one file for each size, and copied behind the table.
    Where a table would have more than 100 MB, which readers refuse, another file begins.

    Args:
        max_shard_size: in bytes; a file is larger only where one tensor is.
        tied: other names of tensors that are written once.
    """

    def __init__(self, folder: str, max_shard_size: int, tied: Mapping[str, str] | None = None) -> None:
        self._folder, self._most, self._tied = folder, max_shard_size, tied or {}
        self._files: list[list[str]] = []  # names of tensors in each that is whole
        self._aside: dict[str, tuple[torch.dtype, Sequence[int]]] = {}  # in none yet
        self._end = self._total = 0  # bytes of tensors aside, and of all
        self._table = self._notes = len(json.dumps(self._tied)) + 1000  # bytes that a table may have

    def add(self, name: str, dtype: torch.dtype, shape: Sequence[int], blocks: Iterable[memoryview]) -> None:
        """Writes a tensor, whose bytes come in blocks."""
        if dtype not in _NAMES:
            raise ConfigurationError(f"{name!r} is of dtype {dtype}, which safetensors files can't hold")
        if name == _NOTES or any(name in names for names in (self._aside, *self._files)):
            raise ConfigurationError(
                f"a tensor's name is {name!r}, which another one (a part of a weight) or a file's notes have; change it"
            )
        nbytes, entry = math.prod(shape) * dtype.itemsize, len(json.dumps(name)) + 21 * len(shape) + 100
        if (self._end and self._end + nbytes > self._most) or (
            self._aside and self._table + entry > _HEADER_LIMIT
        ):
            self._end_file()
        with open(self._path_aside(dtype.itemsize), "ab") as file:
            file.writelines(blocks)
        self._aside[name] = dtype, shape
        self._end, self._total, self._table = self._end + nbytes, self._total + nbytes, self._table + entry

    def _path_aside(self, itemsize: int) -> str:
        return os.path.join(self._folder, f"{itemsize}.part")

    def _path(self, number: int) -> str:
        return os.path.join(self._folder, f"{number}.whole.part")

    def _end_file(self) -> None:
        """Puts what is aside behind its table, and compares that with the file's size."""
        notes = {other: kept for other, kept in self._tied.items() if kept in self._aside}
        table: StateDict = {_NOTES: {"format": "pt", **notes}}
        end, path = 0, self._path(len(self._files))
        for name, (dtype, shape) in sorted(self._aside.items(), key=lambda item: -item[1][0].itemsize):
            places = [end, end + math.prod(shape) * dtype.itemsize]
            table[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": places}
            end = places[1]
        text = json.dumps(table, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        with open(path, "wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for size in sorted({dtype.itemsize for dtype, _ in self._aside.values()}, reverse=True):
                with open(self._path_aside(size), "rb") as tensors:
                    shutil.copyfileobj(tensors, file, BLOCK)
                os.remove(self._path_aside(size))
        if read_header(path)[0] != table:
            raise ShardkitError(f"{path}: its table is read otherwise than it was written")
        self._files.append(list(self._aside))
        self._aside, self._end, self._table = {}, 0, self._notes

    def finish(self) -> None:
        """Gives files their names, and writes an index where there are several."""
        if self._aside:
            self._end_file()
        count, index = len(self._files), dict[str, str]()
        for number, names in enumerate(self._files):
            place = f"-{number + 1:05d}-of-{count:05d}" if count > 1 else ""
            os.rename(self._path(number), os.path.join(self._folder, f"model{place}.safetensors"))
            index.update(dict.fromkeys(names, f"model{place}.safetensors"))
        if count > 1:
            notes = {"total_size": self._total, **self._tied}
            with open(os.path.join(self._folder, INDEX), "w", encoding="utf-8") as file:
                json.dump({"metadata": notes, "weight_map": index}, file, indent=2, sort_keys=True)


def _copy_others(folder: str, source: str, tensors: Mapping[str, StoredTensor]) -> list[str]:
    """Copies configuration and tokenizer; the dtype in the configuration follows the weights'."""
    if not os.path.isdir(source):
        raise ConfigurationError(f"--files-from {source}: there is no such folder")
    copied = []
    for name in sorted(os.listdir(source)):
        path, is_weights = os.path.join(source, name), name.startswith(".") or name.endswith(".index.json")
        kept = name.endswith((".json", ".txt", ".model", ".jinja", ".py", ".md")) and not is_weights
        if os.path.isfile(path) and kept:
            shutil.copyfile(path, os.path.join(folder, name))
            copied.append(name)
    kinds = {t.dtype for t in tensors.values() if t.dtype.is_floating_point}
    config = os.path.join(folder, "config.json")
    if len(kinds) == 1 and os.path.isfile(config):
        with open(config, encoding="utf-8") as file:
            values = json.load(file)
        key = "torch_dtype" if "torch_dtype" in values else "dtype"
        values[key] = str(kinds.pop()).removeprefix("torch.")
        with open(config, "w", encoding="utf-8") as file:
            json.dump(values, file, indent=2, sort_keys=True)
    return [f"copied from {source}: {', '.join(copied)}"] if copied else []
