"""Checkpoints of which each rank has its own file: torch_xla's FSDP's, and fairscale's (``local_state_dict``)."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from ...checks.runs import check_one_save
from ...errors import ConfigurationError
from ...fsdp.local_checkpoint import note_of
from ...fsdp.names import clean
from ...types import SavedState, StateDict, Tree
from .shard_names import FLAT, split_shard_name
from .stored import Place, Range, Shape, StoredTensor, in_memory
from .torch_files import read_torch_file

METADATA_KEY = "shard_metadata"


def kind_of(tree: object) -> str | None:
    """ "xla" or "fairscale" for what is in the file of a rank; None for any other."""
    metadata = _metadata_in(tree)
    if metadata is None:
        return None
    return "xla" if "shard_info" in metadata else "fairscale"


def _metadata_in(tree: object) -> SavedState | None:
    if isinstance(tree, Mapping):
        for value in [tree.get(METADATA_KEY), *tree.values()]:
            if isinstance(value, Mapping) and ("shard_info" in value or "param_metadata" in value):
                return value
    return None


def _weights_in(tree: SavedState, path: str) -> StateDict:
    """The shards, under whichever key a program put them."""
    held = [
        v
        for v in tree.values()
        if isinstance(v, dict) and any(isinstance(x, StoredTensor) for x in v.values())
    ]
    named = [tree[k] for k in ("model", "weights", "state_dict") if isinstance(tree.get(k), dict)]
    if not named and len(held) != 1:
        raise ConfigurationError(f"{path} has a shard_metadata and no state dict with it under 'model'")
    return (named or held)[0]


def in_natural_order(paths: Sequence[str]) -> list[str]:
    """rank-2 before rank-10."""
    return sorted(
        paths, key=lambda p: [int(x) if x.isdigit() else x for x in re.split(r"(\d+)", os.path.basename(p))]
    )


def read_rank_files(
    paths: Sequence[str], trees: Sequence[StateDict], kind: str
) -> tuple[StateDict, int, list[str]]:
    """The model's state dict of the files of all ranks, their number, and keys that were left out.

    Raises:
        ConfigurationError: they are not those of ranks 0 to W - 1 of one run.
    """
    metadata = [_metadata_in(tree) or {} for tree in trees]
    weights = [_weights_in(tree, path) for tree, path in zip(trees, paths, strict=True)]
    others = [k for k, v in trees[0].items() if v is not metadata[0] and v is not weights[0]]
    ranks = [_rank(m, w, k, len(paths)) for k, (m, w) in enumerate(zip(metadata, weights, strict=True))]
    if sorted(r for r, _ in ranks) != list(range(len(paths))) or any(w != len(paths) for _, w in ranks):
        raise ConfigurationError(
            f"{os.path.dirname(paths[0]) or '.'} has the files of ranks {sorted(r for r, _ in ranks)}, and there have "
            f"to be those of all {ranks[0][1]} ranks and no others; pass a pattern ('folder/rank*.pth') that has them"
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
def _place_of(shard: StoredTensor) -> Callable[[], Place]:
    def where() -> Place:
        place = shard.parts[0].where()
        return replace(place, crc=None)

    return where


def _cut_out(name: str, shape: Shape, start: int, shards: Sequence[tuple[StoredTensor, int]]) -> StoredTensor:
    """A tensor that is the elements from ``start`` on of shards end to end, each with its numel without padding."""
    numel, parts, begin = math.prod(shape), [], 0
    if any(shard.value is not None for shard, _ in shards):  # they had to be read already
        whole = torch.cat([shard.read().reshape(-1)[:held] for shard, held in shards])
        return replace(in_memory(name, whole[start : start + numel].view(shape)), identity=None)
    for shard, held in shards:
        low, high = max(begin, start), min(begin + held, start + numel)
        if low < high:
            parts.append(Range(low - start, high - low, _place_of(shard), low - begin))
        begin += held
    dtype = shards[0][0].stored_dtype
    return StoredTensor(name, tuple(shape), dtype, tuple(parts), dtype)


def _of_torch_xla(weights: Sequence[StateDict], metadata: Sequence[SavedState]) -> StateDict:
    facts = metadata[0]
    found: StateDict = {}
    dtypes = {clean(k): v["_orig_dtype"] for k, v in facts.get("buffer_info", {}).items()}
    for key, value in weights[0].items():
        wrapper, shard = split_shard_name(key)
        if shard is None:
            name = clean(key)
            found[name] = value.cast(dtypes[name]) if name in dtypes else value
            continue
        info = facts["shard_info"][wrapper][shard]
        path = f"{wrapper}.{info['_orig_name']}" if wrapper else info["_orig_name"]
        shards = [(w[key], w[key].numel) for w in weights]
        if not info["_orig_name"].startswith(FLAT):
            found[clean(path)] = _cut_out(clean(path), tuple(info["_orig_size"]), 0, shards)
            continue
        names, shapes, numels = facts["flatten_info"][path]
        holder, start = path.rpartition(".")[0], 0
        for name, shape, numel in zip(names, shapes, numels, strict=True):
            name = clean(f"{holder}.{name}")
            found[name] = _cut_out(name, tuple(shape), start, shards)
            start += numel
    for name, source in facts.get("shared_info", {}).items():
        _share(found, source, name)
    return found


def _of_fairscale(weights: Sequence[StateDict], metadata: Sequence[SavedState]) -> StateDict:
    found: StateDict = {}
    for k, entry in enumerate(metadata[0]["param_metadata"]):
        before = f"{entry['fsdp_path']}." if entry["fsdp_path"] else ""
        for name, info in entry["params"].items():
            key, shards = before + name, []
            for state, meta in zip(weights, metadata, strict=True):
                padding = meta["param_metadata"][k]["params"][name]["padding"]
                shards.append((state[key], state[key].numel - padding))
                if entry["no_broadcast_optim_state"] or shards[0][1] == sum(info["numels"]):
                    break
            starts, begin = [], 0
            for numel in info["numels"]:
                starts.append(begin)
                begin += numel
            for n, shape, start in zip(
                info["names"], info["shapes"], info.get("starts") or starts, strict=True
            ):
                found[before + n] = _cut_out(before + n, tuple(shape), start, shards)
    for entry in metadata[0]["param_metadata"]:
        before = f"{entry['fsdp_path']}." if entry["fsdp_path"] else ""
        for source, target in entry["shared_param_info"]:
            _share(found, before + source, before + target)
    for name in metadata[0]["buffer_names"]:
        if name in weights[0]:
            found[name] = weights[0][name]
    return found


def _share(found: StateDict, source: str, target: str) -> None:
    """A tied weight under its other name."""
    if source in found:
        if found[source].identity is None:
            found[source] = replace(found[source], identity=("shared", source))
        found[target] = found[source]


def read_trees(paths: Sequence[str], trust_pickle: bool) -> list[Tree]:
    """What is in each of the files."""
    return [read_torch_file(path, trust_pickle) for path in paths]
