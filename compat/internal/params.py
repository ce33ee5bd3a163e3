"""fairscale.internal.params, and parallel: norms and means of gradients, groups by name, objects for all ranks."""

from __future__ import annotations

import dataclasses
import enum
import weakref
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from shardkit.backend import Group, ReduceOp, backend_for_device, backend_of_job
from shardkit.errors import BackendError
from shardkit.internal.containers import recursive_copy_to_device as recursive_copy_to_device
from shardkit.reduction.shard_gradients import local_norm
from shardkit.torch_seams.tensors import alike
from shardkit.types import AnyCallable, Tree


@dataclasses.dataclass
class Workhandle:
    """A collective in flight and what to call when it is done."""

    handle: object
    callback: AnyCallable | None = None


def get_global_rank(group: dist.ProcessGroup | None, rank: int) -> int:
    """Returns the global rank of a group's rank; None stands for all ranks."""
    if group is None or group is dist.group.WORLD:
        return rank
    return dist.get_global_rank(group, rank)


def calc_grad_norm(parameters: torch.Tensor | Iterable[torch.Tensor], p: float) -> torch.Tensor:
    """Returns the p-norm of parameters' gradients as one vector, [], computed in fp32 at least (no collective).

    Parameters without a gradient count as zero. Its dtype is that of the first parameter with one.
    """
    if isinstance(parameters, torch.Tensor):
        parameters = [parameters]
    gradients = [x.grad.detach() for x in parameters if x.grad is not None]
    if not gradients:
        return torch.tensor(0.0)
    first = gradients[0]
    wide = [g.to(torch.promote_types(g.dtype, torch.float32)) for g in gradients]
    return local_norm(wide, float(p), wide[0].new_zeros(())).to(first)


# ------------------------------------------------------------ means over ranks
BUCKET_NUMEL = 2**23


@torch.no_grad()
def average_together(tensors: Iterable[torch.Tensor], group: Group, label: str) -> None:
    """Makes each tensor the mean over all ranks, in place; every rank calls it with the same shapes."""
    for bucket in alike(tensors, BUCKET_NUMEL):
        flat = torch.cat([t.detach().reshape(-1) for t in bucket])
        group.all_reduce(flat, op=ReduceOp.AVG, label=label)
        for t, new in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
            t.copy_(new.view(t.shape))


@torch.no_grad()
def average_gradients(params: Iterable[torch.Tensor], group: Group) -> None:
    """Replaces gradients by their means over ranks.

    Those that some ranks have not count as zeros there; those that no rank has stay None.
    """
    for bucket in alike(params, BUCKET_NUMEL) if group.world_size > 1 else ():
        used = [p.grad is not None for p in bucket]
        rows = [(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in bucket]
        flat = torch.cat([*rows, torch.tensor(used).to(rows[0])])
        group.all_reduce(flat, op=ReduceOp.AVG, label="gradients")
        *means, shares = flat.split([*(p.numel() for p in bucket), len(bucket)])
        # what this rank has needs no look; but where ranks share a program, all of them look
        if group.backend.even_shards_only or not all(used):
            used = [share > 0 for share in shares.tolist()]
        for p, mean, some_rank_has_it in zip(bucket, means, used, strict=True):
            p.grad = mean.view_as(p).to(p.dtype) if some_rank_has_it else None


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


# ------------------------------------------------------------ process groups by name, and chunks of equal size
def enable_pytorch_sync_bn(module: nn.Module) -> None:
    """Does nothing: older torch needed to be told of SyncBatchNorm's device count; today's does not."""


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
