"""Groups of ranks for hybrid sharding, and for what stays between forward and backward."""

from __future__ import annotations

import weakref

from ..backend import Backend, Group, backend_of_job
from ..errors import ConfigurationError
from ..types import ProcessGroup

_meshes: weakref.WeakKeyDictionary[Group, dict[int, Group]] = weakref.WeakKeyDictionary()
_replicas: weakref.WeakKeyDictionary[Group, dict[int, Group]] = weakref.WeakKeyDictionary()


def post_forward_mesh(group: Group, count: int) -> Group:
    """The group of ``count`` consecutive ranks that this rank belongs to (collective; made once for a group).

    Raises:
        ConfigurationError: the ranks can't be divided so.
    """
    if group.world_size % count:
        raise ConfigurationError(
            f"{group.world_size} ranks can't be divided into groups of {count}; name a number that divides them"
        )
    known = _meshes.setdefault(group, {})
    if count in known:
        return known[count]
    mine = None
    for first in range(0, group.world_size, count):
        made = group.new_group(range(first, first + count))
        mine = made if made is not None else mine
    if mine is None:
        raise ConfigurationError(f"rank {group.rank} is in none of the groups of {count}")
    known[count] = mine
    return mine


def hybrid_groups(
    shard_size: int, group: ProcessGroup = None, backend: str | Backend | None = None
) -> tuple[Group, Group]:
    """Two groups for hybrid sharding: ranks that share one copy of the model, and ranks with the same shard of it.

    ::

        group, replicas = hybrid_groups(8)          # 8 GPUs of a machine share a copy
        model = FSDP(model, group=group, replicas=replicas)

    Parameters are gathered within ``group`` only; gradients are averaged over both. Every rank calls. Called again, it
    returns the same groups.

    Args:
        shard_size: how many consecutive ranks share one copy.
        group: all ranks that take part; None for all of the job.
        backend: name or instance of the backend; by default that of the device which the job's process group serves.

    Returns:
        The group to shard over and the group of replicas.

    Raises:
        ConfigurationError: the ranks can't be divided so.

    Source: hybrid sharding of PyTorch FSDP (arXiv 2304.11277, section 3.2).
    """
    everyone = backend_of_job(backend).group(group)
    shards = post_forward_mesh(everyone, shard_size)
    known = _replicas.setdefault(everyone, {})
    if shard_size in known:
        return shards, known[shard_size]
    replicas = None
    for offset in range(shard_size):
        made = everyone.new_group(range(offset, everyone.world_size, shard_size))
        replicas = made if made is not None else replicas
    if replicas is None:
        raise ConfigurationError(f"rank {everyone.rank} is in no group of replicas")
    known[shard_size] = replicas
    return shards, replicas
