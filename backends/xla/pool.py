"""Replicas on a CPU-only machine, seen from the process that starts them."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import time
import weakref
from collections.abc import Callable, Mapping
from multiprocessing.context import SpawnProcess
from types import TracebackType

from shardkit.errors import BackendError, ConfigurationError, RankFailedError
from shardkit.types import T

from ..process_facts import Progress
from ..spawning import Name, environment
from .child import serve
from .objects import unpack


def replica_environment(world_size: int) -> dict[str, str]:
    """Environment variables that the runtime of ``world_size`` replicas needs from its start on."""
    # A collective blocks a thread of the runtime, and the default is one thread a core.
    threads = str(4 * world_size)
    return {
        "PJRT_DEVICE": "CPU",
        "CPU_NUM_DEVICES": str(world_size),
        "XLA_THREAD_POOL_SIZE": threads,
        "NPROC": threads,
        "PJRT_NPROC": threads,
        # The asynchronous client chains an execution behind the last one of the same pool thread, which may
        # belong to a replica that waits for this one.
        "PJRT_CPU_ASYNC_CLIENT": "0",
        # Else numbers 0 and 1 are baked into graphs: a value that differs between ranks would split them.
        "XLA_NO_SPECIAL_SCALARS": "1",
        "OMP_NUM_THREADS": "1",
        "TF_CPP_MIN_LOG_LEVEL": os.environ.get("TF_CPP_MIN_LOG_LEVEL", "1"),
    }


class ReplicaPool:
    """``world_size`` XLA replicas with real collectives, as threads of one child process that stays alive.

    After a failure or a timeout the child is ended, and the next call starts a new one.

    Args:
        world_size: number of replicas.
        timeout: seconds a call may take; None: no limit.
        start_timeout: seconds in which the replicas have to be ready, without those in which others had the cores;
            None: no limit.
        environment: variables of the child process besides those that replicas need.
    """

    def __init__(
        self,
        world_size: int,
        *,
        timeout: float | None = 300.0,
        start_timeout: float | None = 180.0,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        if world_size < 1:
            raise ConfigurationError(f"world_size must be at least 1, got {world_size}")
        self.world_size = world_size
        self.timeout = timeout
        self._start_timeout = start_timeout
        self._variables = {**(environment or {}), **replica_environment(world_size)}
        self._process: SpawnProcess | None = None
        self._connection: multiprocessing.connection.Connection | None = None
        self._name: Name | None = None
        _pools.add(self)

    def run(self, fn: Callable[..., T], *args: object) -> list[T]:
        """``fn(rank, *args)`` on every replica; the results in rank order, their XLA tensors on the CPU.

        Raises:
            RankFailedError: the first error of a replica. Its type is "TimeoutError" when the time is over (with all
                Python stacks), and "ProcessExited" or a signal's name when the process died (rank 0 stands for
                all of them then).
        """
        job = pickle.dumps((fn, args))
        connection = self._connected()
        try:
            connection.send_bytes(job)
            return [unpack(data) for data in self._receive(connection, self.timeout)]
        except BaseException:
            self._end(graceful=False)
            raise

    def close(self, kill: bool = False) -> None:
        """Ends the replicas."""
        self._end(graceful=not kill)

    def __enter__(self) -> ReplicaPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _connected(self) -> multiprocessing.connection.Connection:
        if self._process is not None and self._process.is_alive() and self._connection is not None:
            return self._connection
        self._end(graceful=False)
        context = multiprocessing.get_context("spawn")
        connection, theirs = context.Pipe()
        name = Name("xla-replicas", at_death=True)
        with environment(self._variables):
            # no daemon: programs start processes of their own, as data loaders do
            process = context.Process(target=serve, args=(theirs, self.world_size), name=name)
            process.start()
        theirs.close()
        self._process, self._connection, self._name = process, connection, name
        try:
            self._wait_for_start(process, connection)
            self._receive(connection, None)
        except RankFailedError as error:
            self._end(graceful=False)
            if error.remote_type == "TimeoutError":
                raise
            raise BackendError(
                f"the process for {self.world_size} XLA replicas did not start; is torch_xla installed for this "
                f"torch (pip install torch==2.9.0 torch_xla==2.9.0)?\n\n{error.remote_traceback}"
            ) from error
        except BaseException:
            self._end(graceful=False)
            raise
        return connection

    def _wait_for_start(
        self, process: SpawnProcess, connection: multiprocessing.connection.Connection
    ) -> None:
        progress, limit = Progress(process.pid), self._start_timeout
        while not connection.poll(1.0 if limit is None else min(1.0, limit)):
            if limit is not None and progress.seconds() >= limit:
                raise RankFailedError(
                    0, "TimeoutError",
                    f"the process of {self.world_size} XLA replicas is not ready (start_timeout={limit:g}): "
                    f"{progress}. It is here:\n{self._stacks()}",
                )  # fmt: skip

    def _receive(
        self, connection: multiprocessing.connection.Connection, timeout: float | None
    ) -> list[bytes]:
        if not connection.poll(timeout):
            raise RankFailedError(0, "TimeoutError", f"no answer after {timeout:g} s\n{self._stacks()}")
        try:
            kind, payload = connection.recv()
        except (EOFError, ConnectionError):
            raise RankFailedError(0, *self._death()) from None
        if kind == "error":
            raise RankFailedError(*payload)
        return payload

    def _death(self) -> tuple[str, str]:
        code = self._ended(10)
        name = signal.Signals(-code).name if code is not None and code < 0 else "ProcessExited"
        text = (
            f"the process of all {self.world_size} XLA replicas ended with exit code {code} before it answered; its "
            "output says why"
        )
        if name == "SIGABRT":
            text += (
                ". XLA ends it when replicas reach a collective more than 15 s apart. A thread below that is in run() "
                "at schedule() was compiling a program while others waited in one: replicas with equal programs "
                "compile once, so keep what depends on the rank out of the program, or as data. Else compile faster: "
                "XLA_FLAGS=--xla_backend_optimization_level=0"
            )
        return name, text + (f"\n{self._name.written()}" if self._name is not None else "")

    def _ended(self, seconds: float) -> int | None:
        """The process's exit code once it has one; multiprocessing would wait for what it has started, too."""
        deadline = time.monotonic() + seconds
        while self._process is not None and self._process.exitcode is None and time.monotonic() < deadline:
            time.sleep(0.01)
        return None if self._process is None else self._process.exitcode

    def _stacks(self) -> str:
        return "" if self._process is None or self._name is None else self._name.stacks(self._process.pid)

    def _end(self, *, graceful: bool) -> None:
        if self._connection is not None:
            self._connection.close()  # the child takes this as the end
        if self._process is not None:
            if graceful:
                self._ended(5)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if self._process.pid is not None:
                    os.killpg(self._process.pid, signal.SIGKILL)  # with all that it has started
            self._process.kill()  # if it has not got that far
            self._process.join()
        if self._name is not None:
            self._name.close()
        self._process = self._connection = self._name = None


_pools: weakref.WeakSet[ReplicaPool] = weakref.WeakSet()


@atexit.register
def _close_pools() -> None:
    for pool in list(_pools):
        pool.close(kill=True)
