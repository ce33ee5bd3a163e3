"""From what users pass as ``process_group`` to a group of replicas."""

from __future__ import annotations

import torch

from shardkit.backend import Backend, Group
from shardkit.errors import ConfigurationError
from shardkit.types import ProcessGroup

from ..arguments import is_group, size_of
from .group import XlaGroup
from .replica import Replica


def as_group(backend: Backend, replica: Replica, process_group: ProcessGroup) -> Group:
    """The group for None, a torch.distributed group, or an object with ``rank()`` and ``size()``."""
    if process_group is None:
        if not replica.root:
            replica.root.append(XlaGroup(backend, replica, range(replica.world_size)))
        return replica.root[0]
    if is_group(process_group):
        return process_group
    ranks = _ranks_of(process_group, replica)
    if ranks == list(range(replica.world_size)):
        return as_group(backend, replica, None)
    if replica.rank not in ranks:
        raise ConfigurationError(
            f"rank {replica.rank} is no member of the process group with ranks {ranks}; "
            "build the wrapper on member ranks only, or pass a group that this rank is in"
        )
    key = tuple(ranks)
    if key not in replica.parts:
        replica.parts[key] = XlaGroup(backend, replica, ranks)
    return replica.parts[key]


def _ranks_of(process_group: ProcessGroup, replica: Replica) -> list[int]:
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        if process_group is distributed.GroupMember.NON_GROUP_MEMBER:
            raise ConfigurationError(
                f"rank {replica.rank} is no member of the process group that was passed (torch.distributed "
                "gives non-members a placeholder); pass a group that this rank is in"
            )
        if isinstance(process_group, distributed.ProcessGroup):
            return distributed.get_process_group_ranks(process_group)
    size, rank = size_of(process_group), getattr(process_group, "rank", None)
    if size is None or rank is None:
        raise ConfigurationError(
            f"rank {replica.rank}: expected a process group, got {type(process_group).__name__}; pass None, a "
            "torch.distributed group, a shardkit Group, or an object with rank() and size()"
        )
    if size == 1:
        return [replica.rank]
    if size == replica.world_size and rank() == replica.rank:
        return list(range(size))
    raise ConfigurationError(
        f"rank {replica.rank}: can't tell the members of a {type(process_group).__name__} with size {size} and "
        f"rank {rank()} among {replica.world_size} replicas; pass a shardkit Group "
        "(Group.new_group) for a part of them"
    )
