"""From what users pass as ``process_group`` to shardkit's group, which ends with it."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence

import torch.distributed as dist

from shardkit.backend import Backend
from shardkit.errors import ConfigurationError
from shardkit.types import ProcessGroup

from ..arguments import size_of
from ..forked import check_process_group
from ..imagined import GroupInName, RanksInName
from ..torch_types import Store
from .group import C10dGroup

MakeGroup = Callable[[Backend, "dist.ProcessGroup | None", Sequence[int], int], C10dGroup]


class KnownGroups:
    """The groups of one backend: the same object for the same process group, as long as that exists.

    A group and its channels end when torch destroys the process group, which others may still hold then (torch's own
    compiler holds the one that exists when it is imported). What ends for certain is torch's entry in its list of
    process groups, and with it the Python object of the group's store: that is what is watched.

    Args:
        backend: whose groups they are.
        make: called with (backend, process group or None, global ranks, own rank).
    """

    def __init__(self, backend: Backend, make: MakeGroup = C10dGroup) -> None:
        self._backend, self._make = backend, make
        self._known: dict[int, tuple[weakref.ref[Store], C10dGroup]] = {}  # by id of the process group

    def of(self, process_group: ProcessGroup) -> C10dGroup | GroupInName:
        """The group for what a user passes.

        Raises:
            ConfigurationError: there is no process group yet, or it was destroyed, or this rank is no member.
        """
        if isinstance(process_group, C10dGroup):
            return process_group
        if isinstance(process_group, dist.ProcessGroup) or process_group is None:
            return self._of_torch(process_group)
        if process_group is dist.GroupMember.NON_GROUP_MEMBER:
            raise ConfigurationError(
                f"rank {dist.get_rank()} is no member of the process group; build sharded objects on its members only "
                "(new_group returns this value on the other ranks)"
            )
        if isinstance(process_group, RanksInName):
            return GroupInName(self._backend, process_group)
        size = size_of(process_group)
        if size is not None:
            if size == 1:
                return self._make(self._backend, None, [0], 0)
            raise ConfigurationError(
                f"{type(process_group).__name__} has {size} ranks but can't communicate; pass a torch.distributed group"
            )
        raise ConfigurationError(
            f"process_group is a {type(process_group).__name__}; pass a torch.distributed process group, a shardkit "
            "group or None for all ranks"
        )

    def _of_torch(self, process_group: dist.ProcessGroup | None) -> C10dGroup:
        if not dist.is_initialized():
            raise ConfigurationError(
                "no process group exists yet: call torch.distributed.init_process_group(...) first, or start the ranks "
                "with shardkit.launch(fn, world_size)"
            )
        pg = process_group if process_group is not None else dist.group.WORLD
        if pg is None or pg not in _listed():
            raise ConfigurationError(
                "torch.distributed does not know this process group: it was destroyed, or made by other means than "
                "init_process_group and new_group"
            )
        if id(pg) not in self._known:
            check_process_group(pg)
            group = self._make(self._backend, pg, dist.get_process_group_ranks(pg), dist.get_rank(pg))
            entry = weakref.ref(_listed()[pg][1], functools.partial(self._end_of, id(pg)))
            self._known[id(pg)] = entry, group
        return self._known[id(pg)][1]

    def _end_of(self, key: int, _: weakref.ref[Store]) -> None:
        """torch has destroyed a process group."""
        self._known.pop(key)[1].close()


def _listed() -> Mapping[dist.ProcessGroup, tuple[str, Store]]:
    """The process groups that torch knows: for each its backend's name and its store."""
    return dist.distributed_c10d._world.pg_map
