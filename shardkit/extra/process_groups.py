"""Process groups by name, and chunks of equal size."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardkit.errors import BackendError

__all__ = [
    "ProcessGroupName",
    "chunk_and_pad",
    "get_process_group_cached",
    "validate_process_group",
]


class ProcessGroupName(str, enum.Enum):
    """Names of process groups that exist once."""

    default = "default"
    reduce_scatter = "reduce_scatter"


_groups: dict[tuple[ProcessGroupName, tuple[int, ...] | None], Any] = {}
_made_for: list[Any] = [None]  # the default group under which they were made


def get_process_group_cached(
    name: ProcessGroupName = ProcessGroupName.default, ranks: Sequence[int] | None = None
) -> Any:
    """A process group of these ranks (default: all), made at the first call for a name.

    Every rank calls at the same point.

    Raises:
        BackendError: torch.distributed is not initialized.
    """
    if not dist.is_initialized():
        raise BackendError("get_process_group_cached needs torch.distributed; call init_process_group first")
    if _made_for[0] is not dist.group.WORLD:
        _groups.clear()
        _made_for[0] = dist.group.WORLD
    chosen = None if ranks is None else tuple(sorted(set(ranks)))
    if chosen == tuple(range(dist.get_world_size())):
        chosen = None
    key = (ProcessGroupName(name), chosen)
    if key not in _groups:
        _groups[key] = dist.new_group(ranks=None if chosen is None else list(chosen))
    return _groups[key]


def chunk_and_pad(tensor: torch.Tensor, num_chunks: int) -> list[torch.Tensor]:
    """The flattened tensor in chunks of equal size, the last ones padded with zeros (new where padded)."""
    flat = tensor.reshape(-1)
    size = -(-flat.numel() // num_chunks)
    chunks = []
    for i in range(num_chunks):
        chunk = flat[i * size : (i + 1) * size]
        if chunk.numel() < size:
            chunk = nn.functional.pad(chunk, [0, size - chunk.numel()])
        chunks.append(chunk)
    return chunks


def validate_process_group(device: torch.device, process_group: Any) -> None:
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
