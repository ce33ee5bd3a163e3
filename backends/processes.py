"""Ranks as processes of this machine, seen from the process that starts them."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

from shardkit.errors import ConfigurationError, RankFailedError

_START_SECONDS = 180.0
# What a rank reports when another one failed first: the cause is looked for elsewhere for a moment.
_CONSEQUENCES = ("RankLostError", "OutOfStepError", "DistNetworkError", "DistBackendError")
_GRACE_SECONDS = 1.0
_PR_SET_PDEATHSIG = 1


# ---------------------------------------------------------------- in a rank
def _die_with_parent() -> None:
    """The kernel ends this process with its parent (Linux; elsewhere an idle rank ends at the closed pipe)."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _serve(
    connection: Connection, rank: int, world_size: int, rendezvous: str, backend: str,
    start: Callable[..., None] | None, stacks: str,
) -> None:  # fmt: skip
    """Runs what comes over the pipe until it closes."""
    _die_with_parent()
    with open(stacks, "w") as file:
        if hasattr(signal, "SIGUSR1"):
            faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
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
    from .watch import begin_job, end_job

    try:
        begin_job()
        result = pickle.dumps(("ok", fn(rank, *args)))
        end_job()
        connection.send_bytes(result)
    except BaseException as error:  # noqa: BLE001 - the caller's to judge
        _report(connection, error)
    return True


def _report(connection: Connection, error: BaseException) -> None:
    with contextlib.suppress(OSError):
        connection.send_bytes(pickle.dumps(("error", (type(error).__name__, traceback.format_exc()))))


def join_ranks(rank: int, world_size: int, rendezvous: str, backend: str) -> None:
    """Makes this process a rank: process group, device, threads."""
    import torch
    import torch.distributed as dist

    from shardkit.backend import get_backend

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // world_size))
    get_backend(backend).device()  # selects the rank's device
    names = {"cuda": "nccl"}
    dist.init_process_group(
        names.get(backend, backend), init_method=f"file://{rendezvous}", rank=rank, world_size=world_size
    )
    get_backend(backend).group()  # so that a rank which returns without a collective is heard of


def leave_ranks() -> None:
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()


# ---------------------------------------------------------------- in the process that starts them
class RankPool:
    """``world_size`` rank processes that stay alive between calls.

    After a failure or a timeout all ranks are ended, and the next call starts new ones.

    Args:
        world_size: number of ranks.
        backend: "gloo" or "cuda".
        start: makes a process a rank, called with (rank, world_size, rendezvous file, backend); default: a process
            group of that backend.
        timeout: seconds a call may take; None: no limit.
        environment: variables set in the ranks.
    """

    def __init__(
        self, world_size: int, backend: str = "gloo", *, start: Callable[..., None] | None = None,
        timeout: float | None = 300.0, environment: dict[str, str] | None = None,
    ) -> None:  # fmt: skip
        if world_size < 1:
            raise ConfigurationError(f"world_size must be at least 1, got {world_size}")
        self.world_size = world_size
        self.timeout = timeout
        self._backend, self._start = backend, start
        self._environment = dict(environment or {})
        self._processes: list[Any] = []
        self._connections: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        _pools.add(self)

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """``fn(rank, *args)`` on every rank; each rank's result.

        Args:
            fn: an importable function (it travels by name).
            *args: picklable.

        Raises:
            RankFailedError: a rank raised, died, or took longer than the timeout; the others have been ended.
        """
        call = pickle.dumps((fn, args))
        if not self._processes or any(p.exitcode is not None for p in self._processes):
            self._begin()
        for connection in self._connections:
            try:
                connection.send_bytes(call)
            except OSError:
                break  # that rank has died: what it left shows below
        return self._collect(self.timeout)

    def _begin(self) -> None:
        self.close()
        self._folder = tempfile.TemporaryDirectory(prefix="shardkit-ranks-")
        folder = Path(self._folder.name)
        context = multiprocessing.get_context("spawn")
        before = {k: os.environ.get(k) for k in self._environment}
        os.environ.update(self._environment)
        try:
            for rank in range(self.world_size):
                here, there = context.Pipe()
                process = context.Process(
                    target=_serve,
                    name=f"rank {rank}",
                    args=(
                        there, rank, self.world_size, str(folder / "rendezvous"), self._backend, self._start,
                        str(folder / f"stacks{rank}"),
                    ),
                )  # fmt: skip
                process.start()
                there.close()
                self._processes.append(process)
                self._connections.append(here)
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
        self._collect(_START_SECONDS)

    def _collect(self, timeout: float | None) -> list[Any]:
        """One answer from each rank; the first failure ends all of them."""
        deadline = None if timeout is None else time.monotonic() + timeout
        results: list[Any] = [None] * self.world_size
        waiting = dict(enumerate(self._connections))
        failures: list[tuple[int, str, str]] = []
        try:
            while waiting and not failures:
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                ready = multiprocessing.connection.wait(list(waiting.values()), left)
                if not ready:
                    failures.append(self._timed_out(timeout, waiting))
                self._receive(ready, waiting, results, failures)
            grace = time.monotonic() + _GRACE_SECONDS
            while failures and all(f[1] in _CONSEQUENCES for f in failures) and waiting:
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
            cause = next((f for f in failures if f[1] not in _CONSEQUENCES), failures[0])
            self.close(kill=True)
            raise RankFailedError(*cause)
        return results

    def _receive(
        self, ready: Sequence[Any], waiting: dict[int, Connection], results: list[Any],
        failures: list[tuple[int, str, str]],
    ) -> None:  # fmt: skip
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
            f"the process of rank {rank} ended with exit code {code} before it answered",
        )

    def _timed_out(self, timeout: float | None, waiting: dict[int, Connection]) -> tuple[int, str, str]:
        if hasattr(signal, "SIGUSR1"):
            for rank in waiting:
                with contextlib.suppress(OSError):
                    os.kill(self._processes[rank].pid, signal.SIGUSR1)
            time.sleep(0.5)
        folder = Path(self._folder.name) if self._folder is not None else Path()
        stacks = "\n".join(
            f"--- rank {r}\n{(folder / f'stacks{r}').read_text(errors='replace')[-4000:]}" for r in waiting
        )
        text = f"no answer after {timeout:.0f} s from ranks {sorted(waiting)}\n{stacks}"
        return min(waiting), "TimeoutError", text

    def close(self, kill: bool = False) -> None:
        """Ends the ranks."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            if not kill:
                process.join(5)
            if process.exitcode is None:
                process.kill()
                process.join()
        self._processes, self._connections = [], []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def __enter__(self) -> RankPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(kill=error is not None)


_pools: weakref.WeakSet[RankPool] = weakref.WeakSet()


@atexit.register
def _close_pools() -> None:
    for pool in list(_pools):
        pool.close(kill=True)


def launch_processes(
    fn: Callable[..., Any], world_size: int, args: tuple[Any, ...], backend: str, timeout: float | None
) -> list[Any]:
    """Starts ranks for one call."""
    with RankPool(world_size, backend, timeout=timeout) as pool:
        return pool.run(fn, *args)
