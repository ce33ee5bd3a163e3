"""The path of :mod:`shardkit.internal.params` up to fairscale 0.3.6, and a broadcast of objects."""

from __future__ import annotations

import torch
import torch.distributed as dist

from shardkit.backend import backend_for_device, backend_of_job
from shardkit.compat.redirected import redirected_names
from shardkit.internal.params import recursive_copy_to_device
from shardkit.types import Tree

__getattr__ = redirected_names(__name__)


def broadcast_object(
    obj: Tree,
    src_rank: int,
    group: dist.ProcessGroup | None = None,
    dist_device: torch.device | None = None,
) -> Tree:
    """Returns the object of the (global) source rank, on every rank; its tensors are on the CPU (collective).

    Args:
        obj: used on the source rank only.
        group: process group; None for all ranks.
        dist_device: device through which the bytes travel; by default the group's.
    """
    mine = dist.get_rank() == src_rank
    sent = recursive_copy_to_device(obj, non_blocking=False, device=torch.device("cpu")) if mine else None
    backend = backend_of_job() if dist_device is None else backend_for_device(torch.device(dist_device).type)
    members = backend.group(group)
    return members.broadcast_object(sent, members.ranks.index(src_rank), label="broadcast_object")
