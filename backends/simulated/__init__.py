"""Ranks as threads of one process that take turns: deterministic, needs no processes and no network.

For trying things out, for debuggers, and for tests that draw thousands of programs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from shardkit.backend import Backend, Group, Pool, is_group, register_rank_provider, size_of
from shardkit.errors import ConfigurationError
from shardkit.types import ProcessGroup, T

from ..eager import Host
from .group import Line, SimulatedGroup
from .rank_threads import RankThreads

__all__ = ["SimulatedBackend", "SimulatedGroup"]

_rank = threading.local()  # group: this thread's rank among all


class SimulatedBackend(Host):
    """CPU tensors, one thread a rank."""

    name = "simulated"

    def is_available(self) -> bool:
        return True

    def group(self, process_group: ProcessGroup = None) -> Group:
        here: Group | None = getattr(_rank, "group", None)
        if is_group(process_group):
            return process_group
        if process_group is None:
            if here is None:
                raise ConfigurationError(
                    "this thread is no simulated rank; start ranks with shardkit.launch(fn, world_size, "
                    "backend='simulated') and build sharded objects inside fn"
                )
            return here
        if size_of(process_group) == 1:
            return SimulatedGroup(self, RankThreads(1), Line((0,)), 0)
        raise ConfigurationError(
            f"process_group is a {type(process_group).__name__}; simulated ranks take a shardkit group "
            "(Group.new_group) or None for all ranks"
        )

    def _pool(self, world_size: int, timeout: float | None, start_timeout: float | None) -> Pool:
        return SimulatedPool(self, world_size, timeout)


class SimulatedPool(Pool):
    """Threads, new ones for each call. They run any function, and get copies of its arguments.

    When a rank fails, the others end with RankLostError.
    """

    def __init__(self, backend: Backend, world_size: int, timeout: float | None) -> None:
        super().__init__(world_size, timeout, None)
        self._backend = backend

    def run(self, fn: Callable[..., T], *args: object) -> list[T]:
        def enter(rank: int) -> None:
            enter_group(SimulatedGroup(self._backend, threads, line, rank))

        threads, line = RankThreads(self.world_size, enter), Line(range(self.world_size))
        return threads.run(fn, args, self.timeout)

    def close(self, kill: bool = False) -> None:
        """Does nothing: a call ends with its threads."""


def enter_group(group: Group) -> None:
    """Makes the calling thread a rank; this group is what it finds when it asks for all ranks."""
    _rank.group = group


register_rank_provider(lambda: _rank.group.backend if hasattr(_rank, "group") else None)
