"""Reads and writes Hugging Face's folders: safetensors files with an index; reads the older ones of ``torch.save``."""

from __future__ import annotations

import glob
import json
import math
import os
import shutil
import struct
from collections.abc import Mapping

import torch

from ...errors import ConfigurationError, DamagedFileError, ShardkitError
from ...layout import whole_box
from ...types import StateDict, Tree
from .stored import FilePlace, StoredPart, StoredTensor, without_ties
from .torch_files import read_torch_file

INDEX = "model.safetensors.index.json"
_OLD_INDEX = "pytorch_model.bin.index.json"
_HEADER_LIMIT = 100_000_000  # bytes, as in safetensors
_CHUNKS = "DCP_SHARDING_INFO"  # torch's HuggingFaceStorageWriter notes here which box of a tensor a file has

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
}


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
    files = weight_files(path)
    for file in files:
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
    notes = header.pop("__metadata__", None) or {}
    if not isinstance(notes, dict) or _holds_parts(notes):
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
            raise DamagedFileError(f"{path} is no safetensors file, or cut off in its header")
        try:
            header = json.loads(file.read(length))
            facts = [v for k, v in header.items() if k != "__metadata__"]
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
    except (ValueError, KeyError, TypeError, AttributeError):
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
    folder: str, model: StateDict, max_shard_size: str, files_from: str | None
) -> list[str]:
    """Writes the files; returns what a user should know.

    Args:
        folder: empty.
        model: its state dict; what is no tensor is left out.
        max_shard_size: as "5GB"; a file is larger only where one tensor is.
        files_from: a folder with configuration and tokenizer, which are copied.
    """
    try:
        from huggingface_hub import split_state_dict_into_shards_factory as split
        from safetensors import safe_open
    except ImportError as error:
        raise ConfigurationError(
            f"writing Hugging Face's format takes {error.name}: pip install huggingface_hub safetensors"
        ) from None
    notes = []
    others = [name for name, value in model.items() if not isinstance(value, StoredTensor)]
    if others:
        notes.append(f"left out, since safetensors files hold tensors alone: {', '.join(others)}")
    tensors, shared = without_ties({n: v for n, v in model.items() if isinstance(v, StoredTensor)})
    for name, tensor in tensors.items():
        if tensor.dtype not in _NAMES:
            raise ConfigurationError(
                f"{name!r} is of dtype {tensor.dtype}, which safetensors files can't hold"
            )
    for name, kept in shared.items():
        notes.append(f"{name} is tied to {kept}: written once")
    try:
        parts = split(
            tensors,
            get_storage_size=lambda t: t.nbytes,
            filename_pattern="model{suffix}.safetensors",
            max_shard_size=max_shard_size,
        )
    except ValueError as error:
        raise ConfigurationError(f"--max-shard-size {max_shard_size}: {error}") from None
    for file, names in parts.filename_to_tensors.items():
        path = os.path.join(folder, file)
        tied = {n: kept for n, kept in shared.items() if kept in names}
        _write_file(path, {n: tensors[n] for n in names}, {"format": "pt", **tied})
        _check(path, safe_open, set(names))
    if parts.is_sharded:
        index = {"metadata": {**parts.metadata, **shared}, "weight_map": parts.tensor_to_filename}
        with open(os.path.join(folder, INDEX), "w", encoding="utf-8") as text:
            json.dump(index, text, indent=2, sort_keys=True)
    if files_from is not None:
        notes += _copy_others(folder, files_from, tensors)
    return notes


def _write_file(path: str, tensors: Mapping[str, StoredTensor], notes: Mapping[str, str]) -> None:
    """Writes larger elements first, so that all lie at multiples of their size."""
    order = sorted(tensors, key=lambda n: (-tensors[n].dtype.itemsize, n))
    header: dict[str, object] = {"__metadata__": dict(notes)}
    end = 0
    for name in order:
        t = tensors[name]
        places = [end, end + t.nbytes]
        header[name] = {"dtype": _NAMES[t.dtype], "shape": list(t.shape), "data_offsets": places}
        end += t.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in order:
            for block in tensors[name].blocks():
                file.write(block)


def _check(path: str, safe_open, names: set[str]) -> None:  # type: ignore[no-untyped-def]
    try:
        with safe_open(path, framework="pt") as file:
            found = set(file.keys())
    except Exception as error:
        raise ShardkitError(f"{path}: safetensors doesn't read what was written ({error})") from error
    if found != names:
        raise ShardkitError(f"{path}: safetensors finds {len(found)} tensors, {len(names)} were written")


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
