"""Device meshes of torch's in place of process groups."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import ConfigurationError
from ..types import ProcessGroup

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def group_of(mesh: DeviceMesh | None, group: ProcessGroup = None) -> ProcessGroup:
    """Returns all ranks of a mesh, of any number of dimensions; the group that was passed where there is no mesh."""
    if mesh is None:
        return group
    _check(mesh, group)
    return mesh.get_group() if mesh.ndim == 1 else mesh._flatten().get_group()


def shards_and_replicas_of(
    mesh: DeviceMesh | None, group: ProcessGroup = None, replicas: ProcessGroup = None
) -> tuple[ProcessGroup, ProcessGroup]:
    """Returns the ranks that share one copy of the model, and ranks that hold the same shard of it.

    A mesh of one dimension has the former; of one with two they are the last dimension, and replicas the first.
    """
    if mesh is None:
        return group, replicas
    _check(mesh, group if replicas is None else replicas)
    if mesh.ndim > 2:
        raise ConfigurationError(
            f"fully_shard expects a 1D or 2D DeviceMesh but got {mesh}: parameters are sharded over one dimension, or "
            "over the last of two with replicas along the first. Pass the dimensions that are for data, as in "
            'mesh["dp"] or mesh["dp_replicate", "dp_shard"]'
        )
    if mesh.ndim == 1:
        return mesh.get_group(), None
    return mesh.get_group(1), mesh.get_group(0)


def _check(mesh: object, group: ProcessGroup) -> None:
    from torch.distributed.device_mesh import DeviceMesh  # costs those who use none nothing

    if not isinstance(mesh, DeviceMesh):
        raise ConfigurationError(
            f"mesh is a {type(mesh).__name__}; pass a torch.distributed.device_mesh.DeviceMesh, or a process group as "
            "group="
        )
    if group is not None:
        raise ConfigurationError("both mesh and a group were passed, which say the same thing; leave one out")
