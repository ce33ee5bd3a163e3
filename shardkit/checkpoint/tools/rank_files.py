"""Checkpoints of which each rank has its own file: torch_xla's FSDP's, and fairscale's (``local_state_dict``).

A shard of torch_xla's is an entry of its wrapper. Its name holds the path that the parameter has within the wrapper,
with another separator. Paths of modules are without ``_fpw_module`` in state dicts, but with it inside of such names.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, chain
from typing import NamedTuple

import torch

from ...checks import check_one_save
from ...errors import ConfigurationError
from ...fsdp.state import INNER, OUTER, clean
from ...fsdp.state_dict import flat_shards, names_of_shared, note_of
from ...layout import boxes_of
from ...types import SavedState, StateDict
from .stored import FilePlace, Shape, StoredPart, StoredTensor, blocks_of, in_memory, without_ties
from .torch_files import TorchFileWriter

PREFIX = "_fsdp_shard"
SEPARATOR = "_FSDP_SHARD_SEPARATOR_"
FLAT = f"{OUTER}flat_param_"  # so begin the paths of flat parameters


def shard_name(original: str) -> str:
    """Names the shard of a parameter with this path."""
    return f"{PREFIX}.{original}".replace(".", SEPARATOR)


def in_state_dict(path: str) -> str:
    """Returns a path of a module or parameter as state dicts write it."""
    return path.replace("_fpw_module.", "")


class SavedParameter(NamedTuple):
    """A parameter, or a buffer, as state dicts of torch_xla's shards have it.

    Attributes:
        name: its own.
        key: of the shard in which it lies, or of the buffer.
        shape: None of a buffer.
        start: its first element, in the shards of all ranks end to end.
    """

    name: str
    key: str
    shape: tuple[int, ...] | None
    start: int = 0


def parameters_in(keys: Iterable[str], facts: SavedState) -> Iterator[SavedParameter]:
    """Yields all that torch_xla's state dicts with these keys hold, by their shard_metadata."""
    for key in keys:
        parts = key.split(".")
        at = next((k for k, part in enumerate(parts) if part.startswith(PREFIX)), None)
        if at is None:  # buffers are rank 0's
            yield SavedParameter(clean(key), key, None)
            continue
        wrapper = ".".join(parts[:at])
        info = facts["shard_info"][wrapper][".".join(parts[at:])]
        path = f"{wrapper}.{info['_orig_name']}" if wrapper else info["_orig_name"]
        if not info["_orig_name"].startswith(FLAT):
            yield SavedParameter(clean(path), key, tuple(info["_orig_size"]))
            continue
        holder, start = path.rpartition(".")[0], 0
        for name, shape, numel in zip(*facts["flatten_info"][path], strict=True):
            yield SavedParameter(clean(f"{holder}.{name}"), key, tuple(shape), start)
            start += numel


METADATA_KEY = "shard_metadata"


def kind_of(tree: object) -> str | None:
    """Returns "xla" or "fairscale" for what is in the file of a rank; None for any other."""
    metadata = _metadata_in(tree)
    return None if metadata is None else "xla" if "shard_info" in metadata else "fairscale"


def _metadata_in(tree: object) -> SavedState | None:
    if isinstance(tree, Mapping):
        for value in [tree.get(METADATA_KEY), *tree.values()]:
            if isinstance(value, Mapping) and ("shard_info" in value or "param_metadata" in value):
                return value
    return None


def _weights_in(tree: SavedState, path: str) -> StateDict:
    """Returns the shards, under whichever key a program put them."""
    dicts = [v for v in tree.values() if isinstance(v, dict)]
    held = [v for v in dicts if any(isinstance(x, StoredTensor) for x in v.values())]
    named = [tree[k] for k in ("model", "weights", "state_dict") if isinstance(tree.get(k), dict)]
    if not named and len(held) != 1:
        raise ConfigurationError(f"{path} has a shard_metadata and no state dict with it under 'model'")
    return (named or held)[0]


def in_natural_order(paths: Sequence[str]) -> list[str]:
    """Sorts paths: rank-2 before rank-10."""
    return sorted(
        paths, key=lambda p: [int(x) if x.isdigit() else x for x in re.split(r"(\d+)", os.path.basename(p))]
    )


def read_rank_files(
    paths: Sequence[str], trees: Sequence[StateDict], kind: str
) -> tuple[StateDict, int, list[str]]:
    """Reads the model's state dict of the files of all ranks, their number, and keys that were left out."""
    metadata = [_metadata_in(tree) or {} for tree in trees]
    weights = [_weights_in(tree, path) for tree, path in zip(trees, paths, strict=True)]
    others = [k for k, v in trees[0].items() if v is not metadata[0] and v is not weights[0]]
    ranks = [_rank(m, w, k, len(paths)) for k, (m, w) in enumerate(zip(metadata, weights, strict=True))]
    found = sorted(r for r, _ in ranks)
    if found != list(range(len(paths))) or any(w != len(paths) for _, w in ranks):
        raise ConfigurationError(
            f"{os.path.dirname(paths[0]) or '.'} has the files of ranks {found}, and there have to be those of all "
            f"{ranks[0][1]} ranks and no others; pass a pattern ('folder/rank*.pth') that has them"
        )
    order = sorted(range(len(paths)), key=lambda k: ranks[k][0])
    if kind == "xla":
        check_one_save([paths[k] for k in order], [metadata[k] for k in order])
    weights, metadata = [weights[k] for k in order], [metadata[k] for k in order]
    read = _of_torch_xla if kind == "xla" else _of_fairscale
    try:
        return read(weights, metadata), len(paths), others
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigurationError(
            f"{paths[0]}: its shard_metadata doesn't fit its state dict ({type(error).__name__}: {error})"
        ) from None


def _rank(metadata: SavedState, weights: StateDict, position: int, count: int) -> tuple[int, int]:
    note: SavedState | None = metadata if "rank" in metadata else note_of(weights)
    return (position, count) if note is None else (note["rank"], note["world_size"])


# ------------------------------------------------------------ parts of a tensor in shards
def _place_of(shard: StoredTensor) -> Callable[[], FilePlace]:
    def where() -> FilePlace:
        place = shard.parts[0].where()
        if place.strides is not None:
            raise ConfigurationError(
                f"{place.path}: the shard of {shard.name!r} is not contiguous; save it as it is in memory"
            )
        return replace(place, crc=None)

    return where


def _cut_out(name: str, shape: Shape, start: int, shards: Sequence[tuple[StoredTensor, int]]) -> StoredTensor:
    """Cuts a tensor, from ``start`` on, out of shards end to end, each with its numel without padding."""
    parts: list[StoredPart] = []
    numel, begin = math.prod(shape), 0
    if any(shard.value is not None for shard, _ in shards):  # they had to be read already
        whole = torch.cat([shard.read().reshape(-1)[:held] for shard, held in shards])
        return replace(in_memory(name, whole[start : start + numel].view(shape)), identity=None)
    for shard, held in shards:
        low, high = max(begin, start), min(begin + held, start + numel)
        if low < high:
            where = _place_of(shard)
            parts += [StoredPart(box, where) for box in boxes_of(shape, low - start, high - low, low - begin)]
        begin += held
    dtype = shards[0][0].stored_dtype
    return StoredTensor(name, tuple(shape), dtype, tuple(parts), dtype)


def _of_torch_xla(weights: Sequence[StateDict], metadata: Sequence[SavedState]) -> StateDict:
    facts = metadata[0]
    found: StateDict = {}
    dtypes = {clean(k): v["_orig_dtype"] for k, v in facts.get("buffer_info", {}).items()}
    for name, key, shape, start in parameters_in(weights[0], facts):
        if shape is None:
            value = weights[0][key]
            found[name] = value.cast(dtypes[name]) if name in dtypes else value
        else:
            found[name] = _cut_out(name, shape, start, [(w[key], w[key].numel) for w in weights])
    for name, source in facts.get("shared_info", {}).items():
        _share(found, source, name)
    return found


def _of_fairscale(weights: Sequence[StateDict], metadata: Sequence[SavedState]) -> StateDict:
    found: StateDict = {}
    for before, key, info, shards in flat_shards(weights, metadata):
        if not shards:
            raise KeyError(key)
        starts = info.get("starts") or [*accumulate(info["numels"], initial=0)][:-1]
        for n, shape, start in zip(info["names"], info["shapes"], starts, strict=True):
            found[before + n] = _cut_out(before + n, tuple(shape), start, shards)
    for source, target in names_of_shared(metadata[0]):
        _share(found, source, target)
    for name in metadata[0]["buffer_names"]:
        if name in weights[0]:
            found[name] = weights[0][name]
    return found


def _share(found: StateDict, source: str, target: str) -> None:
    """Puts a tied weight under its other name, too."""
    if source in found:
        if found[source].identity is None:
            found[source] = replace(found[source], identity=("shared", source))
        found[target] = found[source]


_XLA_MULTIPLE = 128  # elements to which torch_xla rounds a shard up
_BUFFER = re.compile(r"(^|\.)(running_mean|running_var|num_batches_tracked)$")


class SortedModel(NamedTuple):
    """A model's state dict, sorted for FSDP.

    Attributes:
        params: parameters, which are cut.
        buffers: what each rank has as a whole.
        shared: other name of a parameter -> name.
    """

    params: dict[str, StoredTensor]
    buffers: dict[str, StoredTensor]
    shared: dict[str, str]


def sort_out(model: StateDict, buffers: list[str]) -> SortedModel:
    """Sorts out parameters and buffers: state dicts don't say.

    Taken for buffers are tensors of whole numbers, statistics of batch norms, and what a user names.

    Args:
        buffers: names, or patterns of Python's ``re`` that match a whole name.
    """
    params: dict[str, StoredTensor] = {}
    kept: dict[str, StoredTensor] = {}
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
        else:
            params[name] = value
    untied, shared = without_ties(params)
    return SortedModel(untied, kept, shared)


def write_for_xla(folder: str, cut: SortedModel, ranks: int) -> None:
    """Writes ``rank-NNNNNNNN-of-NNNNNNNN.pth``: a dict of "model" and "shard_metadata"."""
    names, infos = {}, {}
    for name, tensor in cut.params.items():
        # as it is with one wrapper: an outer path inside of the shard's name
        names[name] = shard_name(INNER + name)
        infos[names[name]] = {"_orig_size": torch.Size(tensor.shape), "_orig_name": INNER + name}
    metadata: StateDict = {"shard_info": {"": infos}, "flatten_info": {}, "buffer_info": {}}
    metadata["world_size"] = ranks
    if cut.shared:
        metadata["shared_info"] = dict(cut.shared)
    shards = {names[n]: _shard(t, ranks, _XLA_MULTIPLE) for n, t in cut.params.items()}
    model = {**shards, **{f"{OUTER}{name}": value for name, value in cut.buffers.items()}}
    trees = [{"model": model, METADATA_KEY: {**metadata, "rank": rank}} for rank in range(ranks)]
    _write(folder, [f"rank-{r:08d}-of-{ranks:08d}.pth" for r in range(ranks)], trees, cut)


def write_for_fairscale(folder: str, cut: SortedModel, ranks: int) -> None:
    """Writes ``rank-NNNNN-of-NNNNN.pt``: a dict of "model" (``local_state_dict()``) and "shard_metadata"
    (``local_metadata_dict()``)."""
    shards = {n: _shard(t, ranks, 1) for n, t in cut.params.items()}
    shared = [(source, target) for target, source in cut.shared.items()]
    trees = []
    for rank in range(ranks):
        params = {}
        for name, tensor in cut.params.items():
            size = shards[name].numel
            padding = size - max(0, min(size, tensor.numel - rank * size))
            facts = {"names": [name], "shapes": [torch.Size(tensor.shape)], "numels": [tensor.numel]}
            params[name] = {**facts, "padding": padding}
        entry = {"fsdp_path": "", "params": params, "no_broadcast_optim_state": False}
        entry["shared_param_info"] = shared
        metadata = {"param_metadata": [entry], "buffer_names": list(cut.buffers)}
        trees.append({"model": {**shards, **cut.buffers}, METADATA_KEY: metadata})
    _write(folder, [f"rank-{r:05d}-of-{ranks:05d}.pt" for r in range(ranks)], trees, cut)


def _shard(tensor: StoredTensor, ranks: int, multiple: int) -> StoredTensor:
    """Makes what a rank's file has of a tensor: shape and dtype."""
    numel = -(-tensor.numel // (ranks * multiple)) * multiple
    return StoredTensor(tensor.name, (numel,), tensor.dtype, (), tensor.dtype)


def _write(folder: str, names: list[str], trees: list[StateDict], cut: SortedModel) -> None:
    """Writes all files side by side: a tensor is read once."""
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(open(os.path.join(folder, name), "wb")) for name in names]
        writers = [
            stack.enter_context(TorchFileWriter(file, tree)) for file, tree in zip(files, trees, strict=True)
        ]
        for tensor in cut.params.values():
            whole = tensor.read().reshape(-1)
            for rank, writer in enumerate(writers):
                size = writer.coming[0].numel
                held = whole[rank * size : (rank + 1) * size]
                padding = bytes((size - held.numel()) * tensor.dtype.itemsize)
                writer.write_next(chain(blocks_of(held, tensor.dtype), [padding]))
        for writer in writers:
            for buffer in writer.coming:
                writer.write_next(buffer.blocks())
