"""Ranks as processes of this machine, seen from the process that starts them."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import cast

from shardkit.backend import Backend, get_backend
from shardkit.errors import CONSEQUENCES, ConfigurationError, RankFailedError
from shardkit.launching.started import end_with_parent, note
from shardkit.types import AnyCallable, Args, T

from .diagnosis.watchdog import begin_job, end_job, fail_job
from .spawning import Name, Pool, environment

_GRACE_SECONDS = 1.0  # in which the cause of a rank's consequence is looked for elsewhere


# ---------------------------------------------------------------- in a rank
def _serve(
    connection: Connection,
    rank: int,
    world_size: int,
    rendezvous: str,
    backend: str,
    start: Callable[..., None] | None,
    variables: dict[str, str],
) -> None:
    """Runs what comes over the pipe until it closes."""
    end_with_parent()  # elsewhere than on Linux an idle rank ends at the closed pipe
    os.environ.update(variables)
    note(0)  # a launch within the rank starts ranks of its own
    try:
        (start or join_ranks)(rank, world_size, rendezvous, backend)
        connection.send_bytes(pickle.dumps(("ready", None)))
    except BaseException as error:  # noqa: BLE001 - the caller's to judge
        _report(connection, error)
        return
    try:
        while _serve_one(connection, rank):
            pass
    finally:
        leave_ranks()


def _serve_one(connection: Connection, rank: int) -> bool:
    """Runs one call; False when there will be no further one."""
    try:
        fn, args = pickle.loads(connection.recv_bytes())
    except EOFError:
        return False
    except BaseException as error:  # noqa: BLE001 - the caller's to judge
        _report(connection, error)
        return True
    try:
        begin_job()
        result = pickle.dumps(("ok", fn(rank, *args)))
        end_job()
        connection.send_bytes(result)
    except BaseException as error:  # noqa: BLE001 - the caller's to judge
        fail_job(error)
        _report(connection, error)
    return True


def _report(connection: Connection, error: BaseException) -> None:
    with contextlib.suppress(OSError):
        connection.send_bytes(pickle.dumps(("error", (type(error).__name__, traceback.format_exc()))))


def join_ranks(rank: int, world_size: int, rendezvous: str, backend: str) -> None:
    """Makes this process a rank: process group, device, threads.

    Args:
        rendezvous: address and port of the store in which ranks find each other.
    """
    import torch
    import torch.distributed as dist

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // world_size))
    family = get_backend(backend)
    family.device()  # selects the rank's device
    host, _, port = rendezvous.rpartition(":")
    store = dist.TCPStore(  # type: ignore[attr-defined]
        host, int(port), world_size, is_master=False, wait_for_workers=False
    )
    dist.init_process_group(family.process_group_backend, store=store, rank=rank, world_size=world_size)
    family.group()  # so that a rank which returns without a collective is heard of


def leave_ranks() -> None:
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()


# ---------------------------------------------------------------- in the process that starts them
class RankPool(Pool):
    """``world_size`` rank processes that stay alive between calls.

    After a failure or a timeout all ranks are ended, and the next call starts new ones.

    Args:
        backend: one whose ranks are processes ("gloo", "cuda", ...).
        start: makes a process a rank, called with (rank, world_size, address of a store, backend); default: a process
            group of that backend.
        timeout, start_timeout: as of any :class:`~shardkit.backends.spawning.Pool`.
        environment: variables set in the ranks.
    """

    def __init__(
        self,
        world_size: int,
        backend: str = "gloo",
        *,
        start: Callable[..., None] | None = None,
        timeout: float | None = 300.0,
        start_timeout: float | None = 180.0,
        environment: dict[str, str] | None = None,
    ) -> None:
        super().__init__(world_size, timeout, start_timeout)
        self._backend, self._start = backend, start
        self._environment = dict(environment or {})
        self._processes: list[SpawnProcess] = []
        self._connections: list[Connection] = []
        self._names: list[Name] = []
        self._store: object = None  # kept, not asked for anything

    def run(self, fn: Callable[..., T], *args: object) -> list[T]:
        """Calls ``fn(rank, *args)`` on every rank; returns each rank's result.

        Args:
            fn: an importable function (it travels by name).
            *args: picklable.
        """
        call = _packed(fn, args)
        if not self._processes or any(p.exitcode is not None for p in self._processes):
            self._begin()
        for connection in self._connections:
            try:
                connection.send_bytes(call)
            except OSError:
                break  # that rank has died: what it left shows below
        return cast("list[T]", self._collect(self.timeout))

    def _begin(self) -> None:
        """Starts the ranks. This process holds the store in which they meet, so that it outlives each of them."""
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        self.close()
        store = self._store = TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
        context = multiprocessing.get_context("spawn")
        free = _free_port()
        with environment(self._environment):
            for rank in range(self.world_size):
                here, there = context.Pipe()
                name = Name(f"rank {rank}")
                process = context.Process(
                    target=_serve,
                    name=name,
                    args=(
                        there,
                        rank,
                        self.world_size,
                        f"127.0.0.1:{store.port}",
                        self._backend,
                        self._start,
                        _variables(rank, self.world_size, free),
                    ),
                )
                process.start()
                there.close()
                self._processes.append(process)
                self._names.append(name)
                self._connections.append(here)
        self._collect(self._start_timeout, "the ranks are not ready (start_timeout)")

    def _collect(self, timeout: float | None, late: str = "no answer") -> list[object]:
        """Returns one answer from each rank; the first failure ends all of them."""
        deadline = None if timeout is None else time.monotonic() + timeout
        results: dict[int, object] = {}
        waiting = dict(enumerate(self._connections))
        failures: list[tuple[int, str, str]] = []
        try:
            while waiting and not failures:
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                ready = multiprocessing.connection.wait(list(waiting.values()), left)
                if not ready:
                    failures.append(self._timed_out(f"{late} after {timeout:g} s", waiting))
                self._receive(ready, waiting, results, failures)
            grace = time.monotonic() + _GRACE_SECONDS
            while failures and all(f[1] in CONSEQUENCES for f in failures) and waiting:
                ready = multiprocessing.connection.wait(
                    list(waiting.values()), max(0.0, grace - time.monotonic())
                )
                if not ready:
                    break
                self._receive(ready, waiting, results, failures)
        except BaseException:
            self.close(kill=True)
            raise
        if failures:
            cause = next((f for f in failures if f[1] not in CONSEQUENCES), failures[0])
            self.close(kill=True)
            raise RankFailedError(*cause)
        return [results[rank] for rank in range(self.world_size)]

    def _receive(
        self,
        ready: Sequence[object],
        waiting: dict[int, Connection],
        results: dict[int, object],
        failures: list[tuple[int, str, str]],
    ) -> None:
        for rank, connection in [(r, c) for r, c in waiting.items() if c in ready]:
            del waiting[rank]
            try:
                kind, payload = pickle.loads(connection.recv_bytes())
            except (EOFError, OSError):
                failures.append(self._died(rank))
                continue
            if kind == "error":
                failures.append((rank, *payload))
            else:
                results[rank] = payload

    def _died(self, rank: int) -> tuple[int, str, str]:
        process = self._processes[rank]
        process.join(5)
        code = process.exitcode
        if code is not None and code < 0:
            name = signal.Signals(-code).name
            return rank, name, f"the process of rank {rank} was ended by {name}"
        return (
            rank,
            "ProcessExited",
            f"the process of rank {rank} ended with exit code {code} before it answered; its output says why "
            '(a script that starts ranks has to do so under if __name__ == "__main__":, for every rank imports it)',
        )

    def _timed_out(self, what: str, waiting: dict[int, Connection]) -> tuple[int, str, str]:
        stacks = "\n".join(f"--- rank {r}\n{self._names[r].stacks(self._processes[r].pid)}" for r in waiting)
        return min(waiting), "TimeoutError", f"{what}: ranks {sorted(waiting)}. They are here:\n{stacks}"

    def close(self, kill: bool = False) -> None:
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            if not kill:
                process.join(5)
            if process.exitcode is None:
                process.kill()
                process.join()
        for name in self._names:
            name.close()
        self._processes, self._connections, self._names = [], [], []
        self._store = None


def _packed(fn: AnyCallable, args: Args) -> bytes:
    """Pickles a call for a rank."""
    main = sys.modules.get("__main__")
    name = getattr(fn, "__qualname__", repr(fn))
    if getattr(fn, "__module__", "") == "__main__" and not hasattr(main, "__file__"):
        raise ConfigurationError(
            f"{name} was defined in an interactive session or in text given to Python, which other processes can't "
            "import; put it into a file"
        )
    try:
        return pickle.dumps((fn, args))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigurationError(
            f"{name} and its arguments have to travel to other processes: the function has to stand at the top of a "
            f"module (no lambda, no function within a function), arguments have to be picklable ({error})"
        ) from error


def _variables(rank: int, world_size: int, port: int) -> dict[str, str]:
    """Returns what torchrun sets on one machine, for libraries that read it; nobody used ``port`` a moment ago."""
    variables = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "GROUP_RANK": 0,
        "ROLE_RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": world_size,
        "GROUP_WORLD_SIZE": 1,
        "ROLE_WORLD_SIZE": world_size,
        "ROLE_NAME": "default",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    return {name: str(value) for name, value in variables.items()}


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


# ---------------------------------------------------------------- backends
class StartsProcesses(Backend):
    """A backend whose ranks are processes."""

    def _launch(
        self,
        fn: Callable[..., T],
        world_size: int,
        args: Args,
        timeout: float | None,
        start_timeout: float | None,
    ) -> list[T]:
        self._check_ranks(world_size)
        variables = self._environment_of_ranks(world_size)
        pool = RankPool(
            world_size, self.name, timeout=timeout, start_timeout=start_timeout, environment=variables
        )
        with pool:
            return pool.run(fn, *args)

    def _check_ranks(self, world_size: int) -> None:
        """Raises ConfigurationError where this machine can't have so many."""

    def _environment_of_ranks(self, world_size: int) -> dict[str, str]:
        """Returns variables that the ranks' processes need when they begin, beside those of torchrun."""
        return {}
