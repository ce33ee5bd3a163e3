"""torch_xla.distributed.fsdp.state_dict_utils: shards of all ranks put together, also while the ranks still run.

Reads what torch_xla's FSDP wrote, and shardkit's.
"""

from __future__ import annotations

import functools
import glob
import math
import os
import pickle
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import TypedDict

import torch

from shardkit.backends.xla import sleep
from shardkit.checkpoint.files.loading import load
from shardkit.checkpoint.files.writing import save
from shardkit.checkpoint.tools.rank_files import parameters_in
from shardkit.checks import check_one_save
from shardkit.errors import ConfigurationError, UntrustedFileError
from shardkit.fsdp.state import clean
from shardkit.types import SavedState, StateDict
from shardkit.xla.ranks import rank_and_world_size

__all__ = ["consolidate_sharded_model_checkpoints", "consolidate_sharded_state_dicts"]

_PATIENCE = 60.0  # s
Tensors = Mapping[str, torch.Tensor]
_NOT_YET = (RuntimeError, EOFError, pickle.UnpicklingError, OSError)  # also torch.load's, of half a file
_BETWEEN_LOOKS = 0.1  # s


class ShardMetadata(TypedDict, total=False):
    """Says how a model's parameters lie in the shards of a rank's state dict. The last three torch_xla doesn't write.

    Attributes:
        shard_info: path of a wrapper -> name of a shard -> ``_orig_size`` of the whole parameter, and ``_orig_name``,
            its path within the wrapper.
        flatten_info: path of a flat parameter -> names, shapes and numels of the parameters in it.
        buffer_info: path of a buffer -> ``_orig_dtype``, if it was cast.
        shared_info: name of a weight that has several -> first name.
        run_id, backwards: which run it was, and when.
    """

    shard_info: dict[str, dict[str, StateDict]]
    flatten_info: dict[str, tuple[list[str], list[torch.Size], list[int]]]
    buffer_info: dict[str, StateDict]
    world_size: int
    rank: int
    shared_info: dict[str, str]
    run_id: str
    backwards: int


def consolidate_sharded_state_dicts(
    state_dict_list: Sequence[Tensors], shard_metadata: ShardMetadata
) -> OrderedDict[str, torch.Tensor]:
    """Returns the full state dict of the module that was wrapped.

    Args:
        state_dict_list: ``model.state_dict()`` of each rank, in rank order.
        shard_metadata: ``model.get_shard_metadata()`` of any rank.

    Raises:
        ConfigurationError: the number of state dicts is not the world size.
    """
    if len(state_dict_list) != shard_metadata["world_size"]:
        raise ConfigurationError(
            f"the checkpoint is of {shard_metadata['world_size']} ranks, got the state dicts of {len(state_dict_list)}"
        )
    dtypes = {clean(k): v["_orig_dtype"] for k, v in shard_metadata.get("buffer_info", {}).items()}
    full: OrderedDict[str, torch.Tensor] = OrderedDict()
    joined: dict[str, torch.Tensor] = {}
    for name, key, shape, start in parameters_in(state_dict_list[0], shard_metadata):
        if shape is None:
            value = state_dict_list[0][key]
            full[name] = value.to(dtypes[name]) if name in dtypes else value
            continue
        if key not in joined:
            joined = {key: torch.cat([state[key].reshape(-1) for state in state_dict_list])}
        full[name] = joined[key][start : start + math.prod(shape)].view(shape)
    for name, source in shard_metadata.get("shared_info", {}).items():
        if source in full:
            full[name] = full[source]
    return full


def _facts(checkpoint: SavedState) -> tuple[dict[str, object], dict[str, object]]:
    """Holds what is the same in the files of all ranks."""
    kinds: dict[str, object] = {
        k: v.dtype if isinstance(v, torch.Tensor) else type(v) for k, v in checkpoint["model"].items()
    }
    return kinds, {k: v for k, v in checkpoint["shard_metadata"].items() if k != "rank"}


def _read(path: str, version: tuple[int, int], trust_pickle: bool) -> SavedState:
    found = load(path, trust_pickle=trust_pickle)
    if not isinstance(found, Mapping) or not {"model", "shard_metadata"} <= found.keys():
        raise ConfigurationError(
            f"{path} has no model with shard_metadata, so it is no rank's part of a sharded model: it was "
            "saved without FSDP, or without model.get_shard_metadata() beside model.state_dict()"
        )
    return found


def _all_ranks(pattern: str, target: str, read: Callable[[str], SavedState]) -> list[SavedState]:
    """Reads the files of all ranks, in rank order; an earlier result, which may match the pattern, is left out."""
    paths = [p for p in sorted(glob.glob(pattern)) if os.path.abspath(p) != os.path.abspath(target)]
    if not paths:
        raise ConfigurationError(f"no file matches {pattern}")
    files: dict[str, SavedState] = {p: read(p) for p in paths}
    by_rank: dict[int, SavedState] = {}
    for path, checkpoint in files.items():
        rank, size = checkpoint["shard_metadata"]["rank"], checkpoint["shard_metadata"]["world_size"]
        if size != len(paths) or rank in by_rank:
            raise ConfigurationError(
                f"{path} is rank {rank} of {size}, and {len(paths)} files match {pattern}; there have to be the files "
                "of all ranks and no others"
            )
        by_rank[rank] = checkpoint
    check_one_save(paths, [c["shard_metadata"] for c in files.values()])
    for path, checkpoint in files.items():
        if _facts(checkpoint) != _facts(files[paths[0]]):
            raise ConfigurationError(
                f"{path} and {paths[0]} are of different models: their shard_metadata or the names in them differ; "
                "remove the files of one"
            )
    print(f"found {len(paths)} checkpoint files in {pattern}")
    return [by_rank[rank] for rank in sorted(by_rank)]


def consolidate_sharded_model_checkpoints(
    ckpt_prefix: str,
    ckpt_suffix: str = "*.pth",
    save_path: str = "",
    save_model: bool = True,
    *,
    trust_pickle: bool = False,
    wait: float | None = None,
) -> tuple[OrderedDict[str, torch.Tensor], str | None]:
    """Puts the checkpoint files of all ranks together: dicts with ``model`` and ``shard_metadata``.

    A rank may call it as soon as its own file is saved. It waits for those of the others: until there are as many as
    ranks, all whole, and all of the same save of the same run.

    Args:
        ckpt_prefix, ckpt_suffix: files that match ``ckpt_prefix + ckpt_suffix`` are read.
        save_path: where to save ``{"model": full state dict}``; default ``ckpt_prefix + "_consolidated.pth"``.
        save_model: whether to save at all.
        trust_pickle: read files that hold more than data, too; see :func:`shardkit.load`.
        wait: for so many seconds at most; by default a minute in a job of several ranks, else not at all.

    Returns:
        The full state dict, and where it was saved (None without ``save_model``).

    Raises:
        ConfigurationError: no file matches, or they are not those of ranks 0 to W - 1 of one world size, one model and
            one save.
        DamagedFileError: a file is not whole.
        UntrustedFileError: a file holds more than data.
    """
    target = save_path or ckpt_prefix + "_consolidated.pth"
    pattern = ckpt_prefix + ckpt_suffix
    if wait is None:
        wait = _PATIENCE if rank_and_world_size()[1] > 1 else 0.0
    deadline, kept = time.monotonic() + wait, functools.cache(_read)

    def read(path: str) -> SavedState:
        facts = os.stat(path)
        return kept(path, (facts.st_mtime_ns, facts.st_ino), trust_pickle)  # anew once it has changed

    while True:
        try:
            ordered = _all_ranks(pattern, target, read)
            break
        except _NOT_YET as error:
            if isinstance(error, UntrustedFileError) or time.monotonic() >= deadline:
                raise
        sleep(_BETWEEN_LOOKS)
    full = consolidate_sharded_state_dicts([c["model"] for c in ordered], ordered[0]["shard_metadata"])
    if not save_model:
        return full, None
    save({"model": full}, target)
    print(f"saved consolidated model to {target}")
    return full, target
