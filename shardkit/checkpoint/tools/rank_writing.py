"""Writes a model as files of ranks: torch_xla's FSDP reads one format, fairscale's the other.

Each parameter is cut by itself (``flatten_parameters=False``, one wrapper around the model), since how a program
groups parameters is in its wrapping and in no checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from typing import NamedTuple

import torch

from ...errors import ConfigurationError
from ...fsdp.names import INNER
from ...types import StateDict
from .shard_names import shard_name
from .stored import StoredTensor, blocks_of
from .torch_writing import TorchFileWriter

_XLA_MULTIPLE = 128  # elements to which torch_xla rounds a shard up
_BUFFER = re.compile(r"(^|\.)(running_mean|running_var|num_batches_tracked)$")


class Cut(NamedTuple):
    """A model's state dict, sorted for FSDP.

    Attributes:
        params: parameters, which are cut.
        buffers: what each rank has as a whole.
        shared: other name of a parameter -> name.
    """

    params: dict[str, StoredTensor]
    buffers: dict[str, StoredTensor]
    shared: dict[str, str]


def sort_out(model: StateDict, buffers: list[str]) -> Cut:
    """What is a parameter and what a buffer: state dicts don't say.

    Taken for buffers are tensors of whole numbers, statistics of batch norms, and what a user names.

    Args:
        buffers: names, or patterns of Python's ``re`` that match a whole name.
    """
    params: dict[str, StoredTensor] = {}
    kept: dict[str, StoredTensor] = {}
    shared: dict[str, str] = {}
    first: dict[object, str] = {}
    try:
        patterns = [re.compile(b) for b in buffers]
    except re.error as error:
        raise ConfigurationError(f"--buffer {error.pattern!r} is no pattern: {error}") from None
    for name, value in model.items():
        if not isinstance(value, StoredTensor):
            continue
        named = name in buffers or any(p.fullmatch(name) for p in patterns)
        if named or _BUFFER.search(name) or not (value.dtype.is_floating_point or value.dtype.is_complex):
            kept[name] = value
        elif value.identity is not None and value.identity in first:
            shared[name] = first[value.identity]
        else:
            params[name] = value
            first[value.identity] = name
    return Cut(params, kept, shared)


def write_for_xla(folder: str, cut: Cut, ranks: int) -> None:
    """``rank-NNNNNNNN-of-NNNNNNNN.pth``: a dict of "model" and "shard_metadata"."""
    names, infos = {}, {}
    for name, tensor in cut.params.items():
        # as it is with one wrapper: an outer path inside of the shard's name
        names[name] = shard_name(INNER + name)
        infos[names[name]] = {"_orig_size": torch.Size(tensor.shape), "_orig_name": INNER + name}
    trees = []
    for rank in range(ranks):
        metadata: StateDict = {
            "shard_info": {"": infos}, "flatten_info": {}, "buffer_info": {}, "world_size": ranks, "rank": rank,
        }  # fmt: skip
        if cut.shared:
            metadata["shared_info"] = dict(cut.shared)
        shards = {names[n]: _shard(t, ranks, _XLA_MULTIPLE) for n, t in cut.params.items()}
        trees.append({"model": {**shards, **_of_xla_wrapper(cut.buffers)}, "shard_metadata": metadata})
    _write(folder, [f"rank-{r:08d}-of-{ranks:08d}.pth" for r in range(ranks)], trees, cut)


def _of_xla_wrapper(buffers: dict[str, StoredTensor]) -> StateDict:
    """A wrapper's own state dict has them under its module's name."""
    return {f"_fsdp_wrapped_module.{name}": value for name, value in buffers.items()}


def write_for_fairscale(folder: str, cut: Cut, ranks: int) -> None:
    """``rank-NNNNN-of-NNNNN.pt``: a dict of "model" (``local_state_dict()``) and "shard_metadata"
    (``local_metadata_dict()``)."""
    trees = []
    for rank in range(ranks):
        params = {}
        for name, tensor in cut.params.items():
            size = _shard_numel(tensor, ranks, 1)
            padding = size - max(0, min(size, tensor.numel - rank * size))
            params[name] = {
                "names": [name], "shapes": [torch.Size(tensor.shape)], "numels": [tensor.numel], "padding": padding,
            }  # fmt: skip
        entry = {
            "fsdp_path": "", "params": params, "no_broadcast_optim_state": False,
            "shared_param_info": [(source, target) for target, source in cut.shared.items()],
        }  # fmt: skip
        metadata = {"param_metadata": [entry], "buffer_names": list(cut.buffers)}
        shards = {n: _shard(t, ranks, 1) for n, t in cut.params.items()}
        trees.append({"model": {**shards, **cut.buffers}, "shard_metadata": metadata})
    _write(folder, [f"rank-{r:05d}-of-{ranks:05d}.pt" for r in range(ranks)], trees, cut)


def _shard_numel(tensor: StoredTensor, ranks: int, multiple: int) -> int:
    return -(-tensor.numel // (ranks * multiple)) * multiple


def _shard(tensor: StoredTensor, ranks: int, multiple: int) -> StoredTensor:
    """What a rank's file has of it: shape and dtype."""
    return StoredTensor(tensor.name, (_shard_numel(tensor, ranks, multiple),), tensor.dtype, (), tensor.dtype)


def _write(folder: str, names: list[str], trees: list[StateDict], cut: Cut) -> None:
    """All files side by side: a tensor is read once."""
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(open(os.path.join(folder, name), "wb")) for name in names]
        writers = [
            stack.enter_context(TorchFileWriter(file, tree)) for file, tree in zip(files, trees, strict=True)
        ]
        for tensor in cut.params.values():
            _write_shards(tensor.read().reshape(-1), tensor.dtype, writers)
        for writer in writers:
            for buffer in writer.coming:
                writer.write_next(buffer.blocks())


def _write_shards(whole: torch.Tensor, dtype: torch.dtype, writers: list[TorchFileWriter]) -> None:
    for rank, writer in enumerate(writers):
        size = writer.coming[0].numel
        writer.write_next(_padded(whole, rank * size, size, dtype))


def _padded(whole: torch.Tensor, start: int, size: int, dtype: torch.dtype) -> Iterator[memoryview | bytes]:
    held = whole[start : start + size]
    yield from blocks_of(held, dtype)
    if held.numel() < size:
        yield bytes((size - held.numel()) * dtype.itemsize)
