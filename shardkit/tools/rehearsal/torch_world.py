"""torch.distributed for simulated ranks: every thread has process groups of its own.

torch keeps what a process knows of its groups in one object, ``_world``, which may be replaced; groups are made by one
function. Both names are torch's own: :func:`check` says what is missing in another version.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from datetime import timedelta
from unittest import mock

import torch
import torch.distributed as dist

from shardkit.backends.diagnosis.stack_report import Call
from shardkit.backends.eager import worlds_of_ranks
from shardkit.backends.simulated import Line, SimulatedGroup
from shardkit.backends.simulated.process_group import ProcessGroupOfThreads
from shardkit.backends.simulated.rank_threads import Condition, RankThreads
from shardkit.errors import BackendError, ConfigurationError
from shardkit.types import Tree

from .ranks import Rank, current

_C10D: Tree = dist.distributed_c10d
_BINDINGS: Tree = torch._C._distributed_c10d
_PLUGIN = "shardkit_rehearsal"
NAMES = (
    "_world",
    "_new_process_group_helper",
    "rendezvous",
    "_default_pg_init_method",
    "_backend",
    "BackendConfig",
)
_pending = threading.local()  # line: what the group that is being made communicates over


def check() -> None:
    """Raises BackendError naming what this version of torch has otherwise."""
    missing = [name for name in NAMES if not hasattr(_C10D, name)]
    if not hasattr(_BINDINGS, "_set_thread_isolation_mode"):
        missing.append("_set_thread_isolation_mode")
    if missing:
        raise BackendError(
            f"torch {torch.__version__} keeps its process groups otherwise than a rehearsal knows: "
            f"{', '.join(missing)}; take a version of torch that shardkit supports, or rehearse what needs no "
            "torch.distributed with shardkit.launch(..., backend='simulated')"
        )


@contextlib.contextmanager
def torch_worlds(store: SharedStore) -> Iterator[None]:
    """Makes ``torch.distributed`` of each rank's thread that of a process of its own, inside of it."""
    check()
    if _PLUGIN.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(_PLUGIN, _create, extended_api=True, devices=["cpu"])
    isolate: Callable[[bool], None] = _BINDINGS._set_thread_isolation_mode
    meets = _rendezvous(_C10D.rendezvous, store)
    with ExitStack() as stack:
        for module in (dist, sys.modules["torch.distributed.rendezvous"]):  # programs may have it from either
            stack.enter_context(mock.patch.object(module, "rendezvous", meets))
        for name, value in {
            "_world": worlds_of_ranks(lambda: getattr(current(), "world", None)),
            "_new_process_group_helper": _helper(_C10D._new_process_group_helper),
            "rendezvous": meets,
            "_default_pg_init_method": _C10D._default_pg_init_method,
            "_backend": _C10D._backend,
        }.items():
            stack.enter_context(mock.patch.object(_C10D, name, value))
        stack.enter_context(mock.patch.object(sys, "excepthook", sys.excepthook))
        isolate(True)
        stack.callback(isolate, False)
        yield


def _rendezvous(outside: Callable[..., Tree], store: SharedStore) -> Callable[..., Tree]:
    def rendezvous(url: str, rank: int = -1, world_size: int = -1, **kwargs: object) -> Tree:
        here = current()
        if here is None:
            return outside(url, rank, world_size, **kwargs)
        for name, given, true in (("rank", rank, here.number), ("world_size", world_size, here.world_size)):
            if given not in (-1, true):
                raise ConfigurationError(
                    f"rank {here.number}: init_process_group was given {name}={given}, but this is rank {here.number} "
                    f"of {here.world_size} in the rehearsal; take both from the environment (RANK, WORLD_SIZE), or "
                    f"rehearse with --ranks {given if name == 'world_size' else here.world_size}"
                )
        return iter([(store, here.number, here.world_size)])

    return rendezvous


def _helper(outside: Callable[..., Tree]) -> Callable[..., Tree]:
    """Makes groups; all ranks come here for all groups, but where a group synchronizes its members only."""

    def helper(*args: Tree, **kwargs: object) -> Tree:
        rank = current()
        if rank is None:
            return outside(*args, **kwargs)
        size, number, members, backend, store, name, *more = args
        _pending.line = _agreed_line(rank, list(members), str(name))
        kwargs.update(backend_options=None, device_id=None)
        made = outside(size, number, members, _PLUGIN, store, name, *more, **kwargs)
        group = made[0]
        if isinstance(group, ProcessGroupOfThreads):
            world = _C10D._world
            world.pg_map[group] = dist.Backend(backend), world.pg_map[group][1]
            world.pg_backend_config[group] = str(_C10D.BackendConfig(dist.Backend(backend)))
        return made

    return helper


def _agreed_line(rank: Rank, members: list[int], name: str) -> Line:
    """Agrees on what the members of a new group share; returns when all that have to call have."""
    everyone = rank.everyone
    is_local = len(name) == 40  # the name of a group that only its members know is a hash
    if is_local and members:
        caller = everyone.among(members, f"group of ranks {members} {name[:8]}")
        return caller._issue(
            "new_group", 0, "", (tuple(members),), None, lambda _: Line(members, f"group of {members}")
        ).result()
    what, named = "init_process_group", "default group"
    if members:
        what, named = f"new_group({members})", f"group {name} of ranks {members}"
    found: Line = everyone._issue(
        what, 0, "", (), None, lambda _: Line(members or everyone.ranks, named)
    ).result()
    return found


def _create(options: Tree, _: object) -> ProcessGroupOfThreads:
    """Makes a new group; torch calls it for each member."""
    rank = current()
    if rank is None:
        raise ConfigurationError(f"{_PLUGIN!r} serves ranks of a rehearsal only")
    everyone, line = rank.everyone, _pending.line
    below = SimulatedGroup(everyone.backend, everyone._threads, line, line.ranks.index(rank.number))
    return ProcessGroupOfThreads(below)


# ------------------------------------------------------------ the store
_Base: Tree = vars(dist)["Store"]  # mypy does not find it under its name


class SharedStore(_Base):  # type: ignore[misc]
    """One for all ranks; who waits for a key gives the others their turn.

    Methods have torch's names, and those by which its C++ calls them.
    """

    def __init__(self, threads: RankThreads) -> None:
        super().__init__()
        self._threads, self._values = threads, dist.HashStore()  # type: ignore[attr-defined]

    def set(self, key: str, value: Tree) -> None:
        self._values.set(key, value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._values.get(key)

    def add(self, key: str, amount: int) -> int:
        return self._values.add(key, amount)

    def append(self, key: str, value: Tree) -> None:
        self._values.append(key, value)  # type: ignore[attr-defined]

    def compare_set(self, key: str, expected: Tree, desired: Tree) -> bytes:
        return self._values.compare_set(key, expected, desired)

    def delete_key(self, key: str) -> bool:
        return self._values.delete_key(key)

    def num_keys(self) -> int:
        return self._values.num_keys()

    def check(self, keys: Sequence[str]) -> bool:
        return self._values.check(list(keys))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Returns when another rank has set them all."""
        wanted = list(keys)
        if self.check(wanted):
            return
        rank = current()
        if rank is None:
            raise ConfigurationError(
                f"a thread that is no simulated rank waits for {wanted} in a rehearsal's store"
            )
        call = Call("store", 0, f"wait for {wanted}", 0, "")
        self._threads.wait(rank.number, Condition(lambda: self.check(wanted)), call)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[Tree]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        return False

    compareSet = compare_set
    deleteKey = delete_key
    getNumKeys = num_keys
