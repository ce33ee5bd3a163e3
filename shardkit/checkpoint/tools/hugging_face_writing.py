"""Writes Hugging Face's folders tensor by tensor: safetensors files of a limited size, and their index.

[Note: safetensors] ``safetensors.torch.save_file`` wants all tensors of a file in memory. The format is a header of
JSON and bytes, so files are written here, and each is opened by safetensors itself before the folder gets its name.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Mapping

from ...errors import ConfigurationError, ShardkitError
from ...types import StateDict
from .hugging_face import DTYPES, INDEX, other_files
from .stored import StoredTensor

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_WRAPPERS = ("module.", "_orig_mod.")  # what DDP, ShardedDDP and torch.compile put in front of all names


def without_wrappers(model: StateDict) -> tuple[StateDict, list[str]]:
    """Names without what a wrapper put in front of all of them, and what that was."""
    removed = []
    while model and (found := next((w for w in _WRAPPERS if all(n.startswith(w) for n in model)), None)):
        removed.append(found)
        model = {name.removeprefix(found): value for name, value in model.items()}
    return model, removed


def write_hugging_face(
    folder: str, model: StateDict, max_shard_size: str, files_from: str | None
) -> list[str]:
    """The files; returns what a user should know.

    Args:
        folder: empty.
        model: its state dict; what is no tensor is left out.
        max_shard_size: as "5GB"; a file is larger only where one tensor is.
        files_from: a folder with configuration and tokenizer, which are copied.

    Raises:
        ConfigurationError: a dtype that safetensors doesn't have, a size that is none, or a library that is missing.
    """
    split, safe_open = _libraries()
    notes = []
    others = [name for name, value in model.items() if not isinstance(value, StoredTensor)]
    if others:
        notes.append(f"left out, since safetensors files hold tensors alone: {', '.join(others)}")
    tensors, shared = _untied({n: v for n, v in model.items() if isinstance(v, StoredTensor)})
    for name, tensor in tensors.items():
        if tensor.dtype not in _NAMES:
            raise ConfigurationError(
                f"{name!r} is of dtype {tensor.dtype}, which safetensors files can't hold"
            )
    for name, kept in shared.items():
        notes.append(f"{name} is tied to {kept}: written once")
    try:
        parts = split(
            tensors, get_storage_size=lambda t: t.nbytes, filename_pattern="model{suffix}.safetensors",
            max_shard_size=max_shard_size,
        )  # fmt: skip
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


def _libraries():  # type: ignore[no-untyped-def]
    try:
        from huggingface_hub import split_state_dict_into_shards_factory
        from safetensors import safe_open
    except ImportError as error:
        raise ConfigurationError(
            f"writing Hugging Face's format takes {error.name}: pip install huggingface_hub safetensors"
        ) from None
    return split_state_dict_into_shards_factory, safe_open


def _untied(tensors: Mapping[str, StoredTensor]) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """Each tensor under its first name, and the other names with the first."""
    kept: dict[str, StoredTensor] = {}
    shared: dict[str, str] = {}
    first: dict[object, str] = {}
    for name, tensor in tensors.items():
        if tensor.identity is not None and tensor.numel > 0:
            source = first.setdefault(tensor.identity, name)
            if source != name:
                shared[name] = source
                continue
        kept[name] = tensor
    return kept, shared


def _write_file(path: str, tensors: Mapping[str, StoredTensor], notes: Mapping[str, str]) -> None:
    """Larger elements come first, so that all lie at multiples of their size."""
    order = sorted(tensors, key=lambda n: (-tensors[n].dtype.itemsize, n))
    header: dict[str, object] = {"__metadata__": dict(notes)}
    end = 0
    for name in order:
        t = tensors[name]
        header[name] = {
            "dtype": _NAMES[t.dtype], "shape": list(t.shape), "data_offsets": [end, end + t.nbytes],
        }  # fmt: skip
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
    """Configuration and tokenizer; the dtype in the configuration follows the weights'."""
    if not os.path.isdir(source):
        raise ConfigurationError(f"--files-from {source}: there is no such folder")
    copied = []
    for path in other_files(source):
        shutil.copyfile(path, os.path.join(folder, os.path.basename(path)))
        copied.append(os.path.basename(path))
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
