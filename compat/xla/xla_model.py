"""torch_xla.core.xla_model, with the names that torch_xla dropped; what is not here is torch_xla's own.

The functions defined here also work in ranks of other backends, so that a script can run on gloo.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import IO, Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from shardkit.checkpoint.files.writing import save as write_whole
from shardkit.internal.params import average_gradients
from shardkit.optimizers.shards import refuse_shards
from shardkit.types import Kwargs, Tree
from shardkit.xla.ranks import current_backend, names_of, rank_and_world_size

__getattr__ = names_of("torch_xla.core.xla_model")


def get_ordinal(defval: int = 0) -> int:
    """Returns this rank; 0 outside of a job."""
    return rank_and_world_size()[0]


def xrt_world_size(defval: int = 1) -> int:
    """Returns the number of ranks; 1 outside of a job."""
    return rank_and_world_size()[1]


def is_master_ordinal(local: bool = True) -> bool:
    """Says whether this is the first rank of its machine, or (``local=False``) of the job."""
    backend = current_backend()
    if local and backend.name == "xla":
        import torch_xla.runtime

        return int(torch_xla.runtime.local_ordinal()) == 0
    place = os.environ.get("LOCAL_RANK", "")
    are_processes = backend.process_group_backend is not None and dist.is_initialized()
    return int(place) == 0 if local and are_processes and place.isdecimal() else get_ordinal() == 0


def xla_device(n: int | None = None, devkind: str | None = None) -> torch.device:
    return current_backend().device()


def mark_step(wait: bool = False, reset_scope: bool = True) -> None:
    current_backend().mark_step(wait=wait)


def master_print(*args: object, local: bool = False, flush: bool = False, **kwargs: Any) -> None:
    """Prints on rank 0, or (``local``) on the first rank of each machine."""
    if is_master_ordinal(local):
        print(*args, flush=flush, **kwargs)


def save(
    data: Tree,
    file_or_path: str | os.PathLike[str] | IO[bytes],
    master_only: bool = True,
    global_master: bool = False,
) -> None:
    """Saves the data as CPU tensors on the first rank of each machine.

    With ``global_master`` on rank 0 alone, with ``master_only=False`` on every rank that calls. A path gets the whole
    file or keeps what was there, see :func:`shardkit.save`.
    """
    # a read: every rank has to take part
    on_cpu = tree_map_only(torch.Tensor, lambda t: t.detach().cpu(), data)
    if not master_only or is_master_ordinal(not global_master):
        if isinstance(file_or_path, str | os.PathLike):
            write_whole(on_cpu, file_or_path)
        else:
            torch.save(on_cpu, file_or_path)


def optimizer_step(
    optimizer: Optimizer,
    barrier: bool = False,
    optimizer_args: Kwargs | None = None,
    groups: Sequence[Sequence[int]] | None = None,
    pin_layout: bool = True,
) -> Tree:
    """Averages all gradients over the ranks, then steps.

    Args:
        optimizer: of the same parameters on all ranks.
        barrier: run what was recorded afterwards.
        optimizer_args: of ``optimizer.step``.
        groups, pin_layout: see torch_xla; groups are torch_xla's business and need its devices.

    Raises:
        ConfigurationError: the parameters are shards of FSDP, whose gradients are means already.
    """
    backend = current_backend()
    params = [p for g in optimizer.param_groups for p in g["params"]]
    if xrt_world_size() > 1:
        refuse_shards(params, "xm.optimizer_step", "Call optimizer.step(): FSDP has averaged the gradients")
    if groups is not None or backend.name == "xla":
        import torch_xla.core.xla_model as original

        return original.optimizer_step(optimizer, barrier, optimizer_args or {}, groups, pin_layout)
    average_gradients(params, backend.group().channel("gradients"))
    return optimizer.step(**(optimizer_args or {}))
