"""Refuses the groups of a rank in a process that was forked from it (a worker of a DataLoader).

Threads don't survive a fork, among them those that move what is sent, so that a collective would never end. The
connections are the parent's, and a word to the job's store would get in between its own. So nothing is sent.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import NoReturn, Protocol

import torch.distributed as dist

from shardkit.errors import LifecycleError


class EndsAtFork(Protocol):
    """Belongs to the process that made it."""

    def left_behind(self) -> None:
        """Notes that this process was forked from that one."""


_first: list[Callable[[], None]] = []
_mine: weakref.WeakSet[EndsAtFork] = weakref.WeakSet()
# torch's process groups that were there at the fork, and the parent's rank
_of_parent: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


def belongs_here(what: EndsAtFork) -> None:
    """Lets it hear of it where this process is a fork."""
    _mine.add(what)


def first_in_fork(call: Callable[[], None]) -> None:
    """Is called in a fork before anything hears of it."""
    _first.append(call)


def refusal(rank: int) -> LifecycleError:
    """Makes the error that is raised where a forked process would communicate."""
    return LifecycleError(
        f"process {os.getpid()} was forked from rank {rank} (as a DataLoader with num_workers does it) and can't "
        "communicate with other ranks, so that sharded modules can't be called in it. Call the module in the rank's "
        "own process, on the batches that the loader gives; if a dataset or collate_fn has to call it: num_workers=0"
    )


def check_process_group(process_group: dist.ProcessGroup) -> None:
    """Raises LifecycleError if it is one of the process that this one was forked from."""
    if process_group in _of_parent:
        raise refusal(_of_parent[process_group])


class Refusing:
    """Stands where a process group was: whatever is asked of it raises an error."""

    def __init__(self, error: Callable[[], LifecycleError]) -> None:
        self._error = error

    def __getattr__(self, name: str) -> NoReturn:
        raise self._error()


def _in_child() -> None:
    for call in _first:
        call()
    if dist.is_initialized():
        rank = dist.get_rank()
        _of_parent.update(dict.fromkeys(dist.distributed_c10d._world.pg_map, rank))
    for what in list(_mine):
        what.left_behind()


os.register_at_fork(after_in_child=_in_child)
