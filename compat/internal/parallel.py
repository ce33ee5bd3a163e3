"""fairscale.internal.parallel: process groups by name, and chunks of equal size."""

from __future__ import annotations

import enum
import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from shardkit.compat.redirected import redirected_names
from shardkit.errors import BackendError

__getattr__ = redirected_names(__name__)


def enable_pytorch_sync_bn(module: nn.Module) -> None:
    """Older torch needed to be told of SyncBatchNorm's device count; today's does not: nothing to do."""


class ProcessGroupName(str, enum.Enum):
    """Names of process groups that exist once."""

    default = "default"
    reduce_scatter = "reduce_scatter"


# By the default group under which they were made; a user may destroy that and make another one.
_groups: weakref.WeakKeyDictionary[
    dist.ProcessGroup, dict[tuple[ProcessGroupName, tuple[int, ...] | None], dist.ProcessGroup]
] = weakref.WeakKeyDictionary()


def get_process_group_cached(
    name: ProcessGroupName = ProcessGroupName.default, ranks: Sequence[int] | None = None
) -> dist.ProcessGroup:
    """Returns a process group of these ranks (default: all), made at the first call for a name.

    Every rank calls at the same point.

    Raises:
        BackendError: torch.distributed is not initialized.
    """
    if dist.group.WORLD is None:
        raise BackendError("get_process_group_cached needs torch.distributed; call init_process_group first")
    made = _groups.setdefault(dist.group.WORLD, {})
    chosen = None if ranks is None else tuple(sorted(set(ranks)))
    if chosen == tuple(range(dist.get_world_size())):
        chosen = None
    key = (ProcessGroupName(name), chosen)
    if key not in made:
        made[key] = dist.new_group(ranks=None if chosen is None else list(chosen))
    return made[key]


def chunk_and_pad(tensor: torch.Tensor, num_chunks: int) -> list[torch.Tensor]:
    """Returns the flattened tensor in chunks of equal size, the last ones padded with zeros (new where padded)."""
    flat = tensor.reshape(-1)
    size = -(-flat.numel() // num_chunks)
    chunks = []
    for i in range(num_chunks):
        chunk = flat[i * size : (i + 1) * size]
        if chunk.numel() < size:
            chunk = nn.functional.pad(chunk, [0, size - chunk.numel()])
        chunks.append(chunk)
    return chunks


def validate_process_group(device: torch.device, process_group: dist.ProcessGroup) -> None:
    """Checks that the group's ranks reach each other with tensors on this device (collective).

    Raises:
        BackendError: they do not.
    """
    if not hasattr(process_group, "allgather"):  # in name only
        return
    ones = torch.ones(1, device=device)
    dist.all_reduce(ones, group=process_group)
    if ones.item() != process_group.size():
        raise BackendError(
            f"a collective over {process_group.size()} ranks reached {int(ones.item())}; check that each rank uses its "
            "own device"
        )
