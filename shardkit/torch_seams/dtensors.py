"""Full tensors as DTensors of torch's that are cut along their first dimension, and back."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeGuard, cast

import torch
from torch import nn
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]

from ..errors import ConfigurationError
from ..types import ProcessGroup, Tree

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec


def mesh_over(ranks: ProcessGroup | DeviceMesh, device_type: str) -> DeviceMesh:
    """The mesh of a process group of torch's; a mesh itself.

    Args:
        ranks: a mesh, a process group, or (ranks to shard over, replicas); None for all.
        device_type: of the tensors that are to be cut.
    """
    from torch.distributed.device_mesh import DeviceMesh

    if isinstance(ranks, DeviceMesh):
        return ranks
    dist = torch.distributed
    group = ranks[0] if isinstance(ranks, tuple) else ranks
    if group is None and dist.is_initialized():
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        raise ConfigurationError(
            "a sharded state dict holds DTensors, which need ranks that torch.distributed knows: pass device_mesh= or "
            "process_group= where the module is wrapped, or take FULL_STATE_DICT, which is the same on every backend"
        )
    return DeviceMesh.from_group(group, device_type)


def cut_rows(full: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """This rank's rows of a tensor that all ranks have, as a DTensor; one number stays as it is.

    Args:
        full: any shape.
        mesh: cut along the last dimension; what is along others are replicas.
    """
    if full.dim() == 0:
        return full
    rank, chunks = mesh.get_local_rank(mesh.ndim - 1), full.chunk(mesh.size(mesh.ndim - 1))
    local = chunks[rank] if rank < len(chunks) else full[:0]
    return _of_rows(local.clone(), mesh, full.shape)


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    """Whether it is a DTensor; imports nothing: where there is one, somebody has."""
    loaded = sys.modules.get("torch.distributed.tensor")
    return loaded is not None and isinstance(value, loaded.DTensor)


def is_cut(value: object) -> bool:
    """Whether it is a DTensor, or a ShardedTensor."""
    return hasattr(value, "full_tensor") or hasattr(value, "local_shards")


def whole(value: Tree) -> torch.Tensor:
    """The full tensor of a DTensor or of a ShardedTensor (collective)."""
    if not hasattr(value, "full_tensor"):
        return _put_together(value)
    here = value.device_mesh.device_type
    full: torch.Tensor = (value if value.device.type == here else value.to(here)).full_tensor()
    return full


def rows_here(like: torch.Tensor, mesh: DeviceMesh, shape: torch.Size) -> DTensor:
    """A DTensor over no values, for what it says: its ``_spec``, and the shape of the rows on this rank.

    Args:
        like: has the dtype and the device.
        mesh: cut along the last dimension; what is along others are replicas.
        shape: of the whole tensor; every rank has all of one without dimensions.
    """
    if not shape:
        return _of_rows(like.new_empty(()), mesh, shape)
    rank, parts = mesh.get_local_rank(mesh.ndim - 1), mesh.size(mesh.ndim - 1)
    most = -(-shape[0] // parts)
    rows = max(0, min(most, shape[0] - rank * most))
    return _of_rows(like.new_empty(()).expand(rows, *shape[1:]), mesh, shape)


def dtensor_of(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """A DTensor over this memory; quicker than ``DTensor.from_local``, which looks at everything anew."""
    from torch.distributed.tensor import DTensor

    return DTensor(at_offset_0(local), spec, requires_grad=False)


def at_offset_0(view: torch.Tensor) -> torch.Tensor:
    """A tensor over the memory of a view, which it keeps alive, in whose storage it is alone.

    A DTensor repeats its local tensor's offset in memory as if it had memory itself. torch copies and pickles only
    those with offset 0, and torch.compile takes only those with the offset of their local tensor: so that has to be 0.
    """
    if view.is_meta:
        return torch.empty_like(view)
    if view.dtype.itemsize == 1:  # torch 2.9 has no float8 in DLPack
        return _over_memory(view.view(torch.uint8)).view(view.dtype)
    return _over_memory(view)


def _over_memory(view: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = from_dlpack(to_dlpack(view))
    return made


def as_parameter(value: torch.Tensor, requires_grad: bool) -> nn.Parameter:
    """A DTensor that nothing else has, as a parameter; ``nn.Parameter`` would make another one."""
    value.requires_grad_(requires_grad)._is_param = True
    return cast("nn.Parameter", value)


def like_dtensor(local: torch.Tensor, other: DTensor) -> DTensor:
    """A DTensor over this memory, which is laid out as another's, in a dtype of its own."""
    from torch.distributed.tensor import DTensor

    mesh, placements = other.device_mesh, other.placements
    shape, stride = other.shape, other.stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


def _of_rows(local: torch.Tensor, mesh: DeviceMesh, shape: torch.Size) -> DTensor:
    from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

    placements: list[Placement] = [
        *(Replicate() for _ in range(mesh.ndim - 1)),
        Shard(0) if shape else Replicate(),
    ]
    strides = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=strides)


def _put_together(sharded: Tree) -> torch.Tensor:
    """The full tensor of a ShardedTensor; what torch has for it gives it to one rank alone."""
    group = sharded._process_group
    shards = sharded.local_shards()
    # of one kind on all ranks, also on those without a shard
    kind = sharded.metadata().shards_metadata[0].placement.device().type
    served = [device.type for device in group._device_types]
    device = kind if kind in served else served[0]
    full = torch.zeros(sharded.size(), dtype=sharded.dtype, device=device)
    for shard in shards:
        part = full
        for dim, (start, size) in enumerate(
            zip(shard.metadata.shard_offsets, shard.metadata.shard_sizes, strict=True)
        ):
            part = part.narrow(dim, start, size)
        part.copy_(shard.tensor)
    torch.distributed.all_reduce(full, group=group)
    return full
