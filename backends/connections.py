"""How ranks of a torch.distributed job get connections of shardkit's own, and how these end.

[Note: sockets] torch connects each rank of a gloo group with every other one at once. A channel's ranks are connected
when a collective first sends something between them, so that a channel costs what its collectives use: W - 1 sockets
where parts are exchanged (gradients), about 2 log2(W) where slices are broadcast or values summed (the others).

[Note: gloo's destructor] waits until nothing is in flight, which after an error of one rank may be never. From then on
process groups are kept from being destroyed, and the process can end.

[Note: forked processes] The groups of a rank are refused in a process that was forked from it (a worker of a
DataLoader). Threads don't survive a fork, among them those that move what is sent, so that a collective would never
end. The connections are the parent's, and a word to the job's store would get in between its own. So nothing is sent.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import datetime
import os
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any, NoReturn, TypeAlias

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from shardkit.errors import LifecycleError

# ------------------------------------------------------------ in a forked process
_mine: weakref.WeakSet[Any] = weakref.WeakSet()  # what belongs to this process
# torch's process groups that were there at the fork, and the parent's rank
_of_parent: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


def belongs_here(what: object) -> None:
    """Calls its ``left_behind()`` in each process that is forked from this one."""
    _mine.add(what)


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
    never_destroy()  # first: gloo would wait for threads that are not there
    if dist.is_initialized():
        _of_parent.update(dict.fromkeys(dist.distributed_c10d._world.pg_map, dist.get_rank()))
    for what in list(_mine):
        what.left_behind()


os.register_at_fork(after_in_child=_in_child)


# ------------------------------------------------------------ connections
Connected: TypeAlias = "torch._C._distributed_c10d.Backend"

_EXIT_SECONDS = 1.0
# gloo gives up by itself later than shardkit, whose message says more.
_SLACK = datetime.timedelta(seconds=20)


def timeout_of(process_group: dist.ProcessGroup, device_type: str) -> datetime.timedelta:
    """Tells how long a collective may take, as ``init_process_group`` or ``new_group`` was told."""
    for kind in (device_type, "cpu"):
        try:
            timeout = process_group._get_backend(torch.device(kind)).options._timeout
        except (RuntimeError, AttributeError):  # serves no such device, or has no options
            continue
        if isinstance(timeout, datetime.timedelta):
            return timeout
    return dist.distributed_c10d.default_pg_timeout


def connect_gloo(store: Store, rank: int, world_size: int, timeout: datetime.timedelta) -> dist.ProcessGroup:
    """Returns a process group over gloo of all who come to this store; see [Note: sockets].

    torch's ``new_group`` wants every rank of the job, or names groups by how many this rank knows already, and
    then waits for ever if ranks know different numbers of them.
    """
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = _devices()
    options._timeout = timeout + _SLACK
    gloo = dist.ProcessGroupGloo(store, rank, world_size, options)
    kind = dist.ProcessGroup.BackendType.GLOO
    return process_group_over(gloo, kind, store, rank, world_size, *map(torch.device, ("cpu", "cuda")))


def process_group_over(
    connected: Connected,
    kind: dist.ProcessGroup.BackendType,
    store: Store,
    rank: int,
    world_size: int,
    *devices: torch.device,
) -> dist.ProcessGroup:
    """Makes torch's process group around a library's connections, which serve these kinds of devices."""
    pg = dist.ProcessGroup(store, rank, world_size)
    pg._set_default_backend(kind)
    for device in devices:
        pg._register_backend(device, kind, connected)
    return pg


def _devices() -> list[dist.ProcessGroupGloo.Device]:
    """Returns the network interfaces that torch's own gloo groups use.

    One device serves one group: pairs of ranks that are connected on demand are told apart by rank alone.
    """
    on_demand = True if sys.platform == "linux" else None  # gloo's other transports have no such thing
    gloo = dist.ProcessGroupGloo
    names = [n for n in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if n]
    if names:
        return [gloo.create_device(interface=name, lazy_init=on_demand) for name in names]
    return [gloo.create_default_device(lazy_init=on_demand)]


# Stands where a process group was: a group must not go on as if it had one rank.
DESTROYED = Refusing(
    lambda: LifecycleError(
        "the process group of this object has been destroyed (torch.distributed.destroy_process_group), and its "
        "connections with it; build the model and the optimizer again on a process group that exists"
    )
)

# Every process group in use, and what uses it.
_process_groups: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
_users: weakref.WeakSet[Any] = weakref.WeakSet()
_broken = False


def register(process_group: dist.ProcessGroup, user: object) -> None:
    """Remembers a process group for the end; its ``user``, if not None, lets go of it at exit."""
    _process_groups.add(process_group)
    if user is not None:
        _users.add(user)


def never_destroy() -> None:
    """Keeps all process groups for ever, see [Note: gloo's destructor]."""
    global _broken
    _broken = True
    for process_group in list(_process_groups):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(process_group))
    _process_groups.clear()


@atexit.register
def _end_threads() -> None:
    """Destroys gloo's groups while Python still runs, if that needs no other rank.

    Shortly after a collective a thread of gloo may still be about to release its tensors. It needs the interpreter's
    lock for that, and without an interpreter it aborts the process.
    """
    if not _broken:
        helper = threading.Thread(target=_let_go, name="shardkit-exit", daemon=True)
        with contextlib.suppress(RuntimeError):  # Python 3.12.0 and 3.12.1 start no thread at exit
            helper.start()
            helper.join(_EXIT_SECONDS)
    never_destroy()


def _let_go() -> None:
    for user in list(_users):
        user.process_group = DESTROYED
