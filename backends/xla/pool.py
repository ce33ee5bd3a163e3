"""Starts ranks: replicas on a CPU-only machine, as threads of one process, or those of this machine's accelerator.

The latter torch_xla starts, in a process of its own that can be ended: its own launcher waits for its ranks in their
order, and for ever, so that one that fails leaves the others in a collective, and nobody hears of it.
"""

from __future__ import annotations

import abc
import contextlib
import faulthandler
import io
import multiprocessing
import multiprocessing.connection
import os
import pickle
import queue
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from shardkit.backend import Pool
from shardkit.errors import BackendError, ConfigurationError, RankFailedError
from shardkit.types import AnyCallable, Args, T

from ..processes import Name, ProcessTime, describe_error, environment, memory, spawn

if TYPE_CHECKING:
    from .runtime import ReplicaState, World


def _here(host: torch.Tensor) -> torch.Tensor:
    import torch_xla

    return host.to(torch_xla.device())


class _HostPickler(pickle.Pickler):
    to_host = False

    def reducer_override(self, obj: object) -> Any:
        # torch's own form of an XLA tensor names the sender's device, which the receiver doesn't have.
        if isinstance(obj, torch.Tensor) and obj.device.type == "xla":
            host = obj.detach().cpu()
            return host.__reduce_ex__(pickle.HIGHEST_PROTOCOL) if self.to_host else (_here, (host,))
        return NotImplemented


def pack(obj: object, *, to_host: bool = False) -> bytes:
    """Pickles ``obj``; its XLA tensors come back on the reader's XLA device, or on the CPU (``to_host``)."""
    pickler = _HostPickler(file := io.BytesIO(), pickle.HIGHEST_PROTOCOL)
    pickler.to_host = to_host
    pickler.dump(obj)
    return file.getvalue()


# What goes back: ("ready", None), ("results", [bytes per rank]) or ("error", (rank, type, traceback)).


def serve(connection: multiprocessing.connection.Connection, world_size: int) -> None:
    """Runs in the child process, as its entry point; never returns."""
    os.setpgid(0, 0)  # what programs start, data loaders' workers for one, ends with this process
    # else they would hold it open when this process has died
    os.register_at_fork(after_in_child=connection.close)
    die_with_parent()
    try:
        world = start_world(world_size)
        connection.send(("ready", None))
        while True:
            connection.send(_work(world, connection.recv_bytes()))
    except EOFError:
        status = 0  # the parent closed its end
    except BaseException:  # noqa: BLE001 - the process ends here, and has nobody else to tell
        status = 1
        connection.send(("error", (0, *describe_error())))
    sys.stdout.flush()
    sys.stderr.flush()
    for process in multiprocessing.active_children():
        process.kill()
    os._exit(status)  # threads may sit in a collective for ever; the interpreter's exit would join them


def start_world(size: int) -> World:
    """Makes the replicas of this process and routes its syncs through them. Once per process."""
    import torch._dynamo.config as compiling
    import torch_xla.core.xla_model as xm
    import torch_xla.runtime

    from . import torch_xla_api
    from .runtime import make_world, ordinals

    world = make_world(size)
    torch_xla_api.install(world)

    def get_memory_info(device: object = None) -> dict[str, int]:
        # XLA has no figures on a CPU: a replica's share of what the process holds, and of the machine
        now, most, machine = (n // size for n in memory())
        return {"bytes_used": now, "bytes_limit": machine, "peak_bytes_used": most}

    xm.get_memory_info = get_memory_info
    # Each replica compiles as a process of its own would; torch keeps so many versions of a function in a process, and
    # runs it as written from then on. The first replicas would stop for compiling where the last ones do not.
    compiling.recompile_limit *= size
    compiling.accumulated_recompile_limit *= size
    if world.rules.pod:
        vars(torch_xla.runtime).update(ordinals(world.rules, size, lambda: world.here().rank))
    return world


def die_with_parent() -> None:
    """Ends this process's group when its parent ends, however that does."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def _work(world: World, job: bytes) -> tuple[str, object]:
    try:
        fn, args = pickle.loads(job)
    except Exception:  # noqa: BLE001 - whatever the caller's classes raise
        return "error", (0, *describe_error())
    world.renew()
    outcomes: queue.SimpleQueue[tuple[int, bytes | tuple[str, str]]] = queue.SimpleQueue()
    for state in world.states:
        threading.Thread(
            target=_replica, args=(state, fn, args, outcomes), name=f"replica-{state.rank}", daemon=True
        ).start()
    results: list[bytes] = [b""] * world.size
    for _ in range(world.size):
        rank, outcome = outcomes.get()
        if not isinstance(outcome, bytes):
            return "error", (rank, *outcome)  # at once: others may wait for this one in the runtime
        results[rank] = outcome
    return "results", results


def _replica(
    state: ReplicaState,
    fn: AnyCallable,
    args: Args,
    outcomes: queue.SimpleQueue[tuple[int, bytes | tuple[str, str]]],
) -> None:
    import torch_xla

    world = state.world
    # of this job: another one may begin as soon as the last result is there
    meeting, turns = world.meeting, world.turns
    turns.take(state.rank)
    try:
        state.enter()
        result = fn(state.rank, *args)
        if state.calls:
            # Another replica may have read a result of these; this one has to take part.
            torch_xla.sync()
        data = pack(result, to_host=True)
        state.wait()
        outcomes.put((state.rank, data))
        meeting.leave(state.rank, "has finished its function")
    except BaseException as error:  # noqa: BLE001 - it is the caller's to judge
        outcomes.put((state.rank, describe_error()))  # first, so that it is the one reported
        meeting.leave(state.rank, f"failed with {type(error).__name__}: {error}", failed=True)
    finally:
        turns.give()


def replica_environment(world_size: int) -> dict[str, str]:
    """Lists environment variables that the runtime of ``world_size`` replicas needs from its start on."""
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


class _ChildPool(Pool):
    """Ranks of a child process, which has a process group of its own."""

    _process: SpawnProcess | None = None
    _connection: multiprocessing.connection.Connection | None = None
    _name: Name | None = None

    def _spawn(
        self, target: Callable[..., None], *args: object, variables: Mapping[str, str]
    ) -> multiprocessing.connection.Connection:
        self._name = Name("xla-replicas")
        with environment(variables):
            self._process, self._connection = spawn(self._name, target, *args)
        return self._connection

    def _received(self, connection: multiprocessing.connection.Connection) -> list[bytes]:
        """Returns the ranks' pickled results, or raises a rank's error."""
        try:
            kind, payload = connection.recv()
        except (EOFError, ConnectionError):
            raise RankFailedError(0, *self._death()) from None
        if kind == "error":
            raise RankFailedError(*payload)
        return payload

    @abc.abstractmethod
    def _death(self) -> tuple[str, str]:
        """Returns what to say of a child that has ended: a type and a text."""

    def _ended(self, seconds: float) -> int | None:
        """Returns the process's exit code once it has one; multiprocessing would wait for what it has started, too."""
        deadline = time.monotonic() + seconds
        while self._process is not None and self._process.exitcode is None and time.monotonic() < deadline:
            time.sleep(0.01)
        return None if self._process is None else self._process.exitcode

    def close(self, kill: bool = False) -> None:
        if self._connection is not None:
            self._connection.close()  # the child takes this as the end
        if self._process is not None:
            if not kill:
                self._ended(5)
            _signal_group(self._process, signal.SIGKILL)  # with all that it has started
            self._process.kill()  # if it has not got that far
            self._process.join()
        if self._name is not None:
            self._name.close()
        self._process = self._connection = self._name = None


def _signal_group(process: SpawnProcess | None, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if process is not None and process.pid is not None:
            os.killpg(process.pid, number)


class ReplicaPool(_ChildPool):
    """``world_size`` XLA replicas with real collectives, as threads of one child process that stays alive.

    After a failure or a timeout the child is ended, and the next call starts a new one.

    Args:
        timeout, start_timeout: as of any :class:`~shardkit.backend.Pool`; seconds in which others had the
            cores don't count for the latter.
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
        super().__init__(world_size, timeout, start_timeout)
        self._variables = {**(environment or {}), **replica_environment(world_size)}

    def run(self, fn: Callable[..., T], *args: object) -> list[T]:
        """Calls ``fn(rank, *args)`` on every replica; returns results in rank order, their XLA tensors on the CPU."""
        job = pickle.dumps((fn, args))
        connection = self._connected()
        try:
            connection.send_bytes(job)
            if not connection.poll(self.timeout):
                text = f"no answer after {self.timeout:g} s\n{self._stacks()}"
                raise RankFailedError(0, "TimeoutError", text)
            return [pickle.loads(data) for data in self._received(connection)]
        except BaseException:
            self.close(kill=True)
            raise

    def _connected(self) -> multiprocessing.connection.Connection:
        if self._process is not None and self._process.is_alive() and self._connection is not None:
            return self._connection
        self.close(kill=True)
        connection = self._spawn(serve, self.world_size, variables=self._variables)
        try:
            self._wait_for_start(connection)
            self._received(connection)
        except RankFailedError as error:
            self.close(kill=True)
            if error.remote_type == "TimeoutError":
                raise
            raise BackendError(
                f"the process for {self.world_size} XLA replicas did not start; is torch_xla installed for this "
                f"torch (pip install torch==2.9.0 torch_xla==2.9.0)?\n\n{error.remote_traceback}"
            ) from error
        except BaseException:
            self.close(kill=True)
            raise
        return connection

    def _wait_for_start(self, connection: multiprocessing.connection.Connection) -> None:
        progress = ProcessTime(None if self._process is None else self._process.pid)
        limit = self._start_timeout
        while not connection.poll(1.0 if limit is None else min(1.0, limit)):
            if limit is not None and progress.seconds() >= limit:
                raise RankFailedError(
                    0,
                    "TimeoutError",
                    f"the process of {self.world_size} XLA replicas is not ready (start_timeout={limit:g}): "
                    f"{progress}. It is here:\n{self._stacks()}",
                )

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

    def _stacks(self) -> str:
        return "" if self._process is None or self._name is None else self._name.stacks(self._process.pid)


_PAUSE = 0.2  # s between looks
_STACKS = 0.5  # s in which ranks write their stacks
_MOST = 8000  # characters of one


class DevicePool(_ChildPool):
    """All devices of this machine, or one of them for ``world_size`` 1; a call begins with the runtime's own start.

    ``run`` raises ConfigurationError for another ``world_size``, and RankFailedError where a rank raised or died, or
    the time is over; all are ended.
    """

    def run(self, fn: Callable[..., T], *args: object) -> list[T]:
        with tempfile.TemporaryDirectory(prefix="shardkit-xla-") as name:
            folder = Path(name)
            try:
                connection = self._spawn(_start, fn, self.world_size, args, folder, variables={})
                return [pickle.loads(data) for data in self._wait(connection, folder)]
            finally:
                self.close(kill=True)

    def _wait(self, connection: multiprocessing.connection.Connection, folder: Path) -> list[bytes]:
        began = time.monotonic()
        name, limit = "start_timeout", self._start_timeout
        while True:
            answers = connection.poll(_PAUSE)
            for failed in folder.glob("failed-*"):
                raise pickle.loads(failed.read_bytes())
            if answers:
                return self._received(connection)
            if name == "start_timeout" and len([*folder.glob("started-*")]) >= self.world_size:
                began, name, limit = time.monotonic(), "timeout", self.timeout
            if limit is not None and time.monotonic() - began >= limit:
                _signal_group(self._process, signal.SIGUSR1)
                time.sleep(_STACKS)
                files = sorted(folder.glob("rank-*"))
                stacks = "\n".join(f"{file.name}:\n{file.read_text()[-_MOST:]}" for file in files)
                text = f"no answer after {limit:g} s ({name}={limit:g})\n{stacks}"
                raise RankFailedError(0, "TimeoutError", text)

    def _death(self) -> tuple[str, str]:
        return "ProcessExited", "the process that starts the ranks ended; its output says why"


# ------------------------------------------------------------------ in that process, and in those of the ranks
def _start(
    connection: multiprocessing.connection.Connection,
    fn: AnyCallable,
    world_size: int,
    args: Args,
    folder: Path,
) -> None:
    os.setpgid(0, 0)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    die_with_parent()
    try:
        from torch_xla._internal import pjrt

        if world_size == 1:  # one device, however many there are
            results = [pjrt._run_singleprocess(_rank, fn, world_size, args, folder)]
        else:
            by_rank = pjrt.run_multiprocess(_rank, fn, world_size, args, folder)
            results = [by_rank[rank] for rank in sorted(by_rank)]
        connection.send(("results", results))
    except BaseException:  # noqa: BLE001 - the process ends here, and has nobody else to tell
        connection.send(("error", (0, *describe_error())))


def _rank(fn: AnyCallable, world_size: int, args: Args, folder: Path) -> bytes:
    import torch_xla.runtime as runtime

    size = runtime.world_size()
    rank = runtime.global_ordinal() if size > 1 else 0
    try:
        if size != world_size:
            raise ConfigurationError(
                f"rank {rank}: launched with world_size={world_size}, but there are {size} devices; pass "
                f"world_size={size}"
            )
        faulthandler.register(signal.SIGUSR1, (folder / f"rank-{rank}").open("w"), all_threads=True)
        (folder / f"started-{rank}").touch()
        return pack(fn(rank, *args), to_host=True)
    except ConfigurationError as error:
        failure: Exception = error if size != world_size else RankFailedError(rank, *describe_error())
    except Exception:  # noqa: BLE001 - it is the caller's to judge
        failure = RankFailedError(rank, *describe_error())
    whole = folder / f"failed-{rank}"
    part = folder / f"part-{rank}"
    part.write_bytes(pickle.dumps(failure))
    part.rename(whole)  # seen at once, whatever the other ranks wait for
    raise failure from None
