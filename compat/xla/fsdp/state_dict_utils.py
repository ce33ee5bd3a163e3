"""torch_xla.distributed.fsdp.state_dict_utils: shards of all ranks put together, also while the ranks still run."""

from __future__ import annotations

from collections import OrderedDict

import torch

from shardkit.backends.xla.backend import sleep
from shardkit.checkpoint.tools import rank_files
from shardkit.checkpoint.tools.rank_files import consolidate_sharded_state_dicts
from shardkit.xla.ranks import rank_and_world_size

__all__ = ["consolidate_sharded_model_checkpoints", "consolidate_sharded_state_dicts"]

_PATIENCE = 60.0  # s


def consolidate_sharded_model_checkpoints(
    ckpt_prefix: str, ckpt_suffix: str = "*.pth", save_path: str = "", save_model: bool = True, *,
    trust_pickle: bool = False, wait: float | None = None,
) -> tuple[OrderedDict[str, torch.Tensor], str | None]:  # fmt: skip
    """See :func:`shardkit.checkpoint.tools.rank_files.consolidate_sharded_model_checkpoints`.

    A rank may call it as soon as its own file is saved. It waits for those of the others: until there are as many as
    ranks, all whole, and all of the same save of the same run.

    Args:
        ckpt_prefix, ckpt_suffix, save_path, save_model, trust_pickle: see there.
        wait: for so many seconds at most; by default a minute in a job of several ranks, else not at all.

    Raises:
        ConfigurationError, DamagedFileError, UntrustedFileError: see there; the state in which files were in the end.
    """
    if wait is None:
        wait = _PATIENCE if rank_and_world_size()[1] > 1 else 0.0
    return rank_files.consolidate_sharded_model_checkpoints(
        ckpt_prefix, ckpt_suffix, save_path, save_model, trust_pickle=trust_pickle, wait=wait, idle=sleep
    )
