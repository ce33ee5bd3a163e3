"""CPU tensors over gloo: the default backend; needs nothing but torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from shardkit.errors import ConfigurationError

from .c10d import C10dGroup
from .host import Host


class GlooBackend(Host):
    """CPU tensors, one process a rank."""

    name = "gloo"

    def __init__(self) -> None:
        self._groups: dict[int, C10dGroup] = {}

    def is_available(self) -> bool:
        return dist.is_available() and dist.is_gloo_available()

    def group(self, process_group: Any = None) -> C10dGroup:
        return resolve_group(self, self._groups, process_group)

    def launch(
        self, fn: Any, world_size: int, args: tuple[Any, ...] = (), *, timeout: float | None = None
    ) -> list[Any]:
        from .processes import launch_processes

        return launch_processes(fn, world_size, args, "gloo", timeout)


def resolve_group(
    backend: Any, cache: dict[int, C10dGroup], process_group: Any, make: Callable[..., C10dGroup] = C10dGroup
) -> C10dGroup:
    """The group for what a user passes; the same object for the same process group, as long as it lives.

    Args:
        make: called with (backend, process group or None, global ranks, own rank).

    Raises:
        ConfigurationError: there is no process group yet, or this rank is no member.
    """
    if isinstance(process_group, C10dGroup):
        return process_group
    if isinstance(process_group, dist.ProcessGroup) or process_group is None:
        if not dist.is_initialized():
            raise ConfigurationError(
                "no process group exists yet: call torch.distributed.init_process_group(...) first, or start the ranks "
                "with shardkit.launch(fn, world_size)"
            )
        pg = process_group if process_group is not None else dist.group.WORLD
        if id(pg) not in cache:  # the group keeps it, so no other one gets its id
            rank = dist.get_rank(pg)
            cache[id(pg)] = make(backend, pg, dist.get_process_group_ranks(pg), rank)
        return cache[id(pg)]
    if process_group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ConfigurationError(
            f"rank {dist.get_rank()} is no member of the process group; build sharded objects on its members only "
            "(new_group returns this value on the other ranks)"
        )
    if callable(getattr(process_group, "rank", None)) and callable(getattr(process_group, "size", None)):
        size = process_group.size()
        if size == 1:
            return make(backend, None, [0], 0)
        raise ConfigurationError(
            f"{type(process_group).__name__} has {size} ranks but can't communicate; pass a torch.distributed group"
        )
    raise ConfigurationError(
        f"process_group is a {type(process_group).__name__}; pass a torch.distributed process group, a shardkit group "
        "or None for all ranks"
    )
