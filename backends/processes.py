"""Ranks as processes of this machine, seen from the process that starts them."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import multiprocessing.context
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import IO, cast

from shardkit.backend import Pool, get_backend
from shardkit.errors import CONSEQUENCES, ConfigurationError, RankFailedError
from shardkit.launching.started import end_with_parent, note, variables_of_rank
from shardkit.types import AnyCallable, Args, T

from .diagnosis.watchdog import begin_job, end_job, fail_job

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
    except BaseException:  # noqa: BLE001 - the caller's to judge
        _report(connection)
        return
    try:
        while _serve_one(connection, rank):
            pass
    finally:
        import torch.distributed as dist

        if dist.is_available() and dist.is_initialized():
            with contextlib.suppress(RuntimeError):
                dist.destroy_process_group()


def _serve_one(connection: Connection, rank: int) -> bool:
    """Runs one call; False when there will be no further one."""
    try:
        fn, args = pickle.loads(connection.recv_bytes())
    except EOFError:
        return False
    except BaseException:  # noqa: BLE001 - the caller's to judge
        _report(connection)
        return True
    try:
        begin_job()
        result = pickle.dumps(("ok", fn(rank, *args)))
        end_job()
        connection.send_bytes(result)
    except BaseException as error:  # noqa: BLE001 - the caller's to judge
        fail_job(error)
        _report(connection)
    return True


def _report(connection: Connection) -> None:
    with contextlib.suppress(OSError):
        connection.send_bytes(pickle.dumps(("error", describe_error())))


def describe_error() -> tuple[str, str]:
    """Returns the class and the traceback of the error that is being handled."""
    kind = sys.exc_info()[0]
    return kind.__name__ if kind else "", traceback.format_exc()


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


# ---------------------------------------------------------------- in the process that starts them
class RankPool(Pool):
    """``world_size`` rank processes that stay alive between calls.

    After a failure or a timeout all ranks are ended, and the next call starts new ones.

    Args:
        backend: one whose ranks are processes ("gloo", "cuda", ...).
        start: makes a process a rank, called with (rank, world_size, address of a store, backend); default: a process
            group of that backend.
        timeout, start_timeout: as of any :class:`~shardkit.backend.Pool`.
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
        """Calls an importable function (it travels by name) with picklable arguments."""
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
        from torch.distributed.elastic.utils.distributed import get_free_port

        self.close()
        store = self._store = TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
        address, free = f"127.0.0.1:{store.port}", get_free_port()
        with environment(self._environment):
            for rank in range(self.world_size):
                name, variables = Name(f"rank {rank}"), variables_of_rank(rank, self.world_size, free)
                args = rank, self.world_size, address, self._backend, self._start, variables
                process, connection = spawn(name, _serve, *args)
                self._processes.append(process)
                self._names.append(name)
                self._connections.append(connection)
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
            name, stacks = signal.Signals(-code).name, self._names[rank].written()
            return rank, name, f"the process of rank {rank} was ended by {name}\n{stacks}".rstrip()
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


# ------------------------------------------------------------ processes seen from outside
# What a spawned one gets, its stacks, and how far it gets on.
# A process may hang long before it runs code of this library: while it imports the program that it was spawned by.
# multiprocessing first sends a process its name. Unpickling this one needs nothing but Python's standard library, and
# makes the process write its stacks on a signal.
#
# Memory, and how long a process had a core, Linux tells; elsewhere they are not known.
_SECONDS = 0.5  # in which a process writes its stacks; it does so when it gets to run
_MOST = 8000  # characters shown

_environment_lock = threading.Lock()
# An expression, since it travels as such. A fatal signal has the stacks written, too.
_SETUP = f"""(
    __import__("faulthandler").enable(file, True),
    __import__("faulthandler").register({int(getattr(signal, "SIGUSR1", 0))}, file, True),
    name,
)[2]"""


@contextlib.contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Sets variables of what is spawned within this block."""
    with _environment_lock:
        before = {name: os.environ.get(name) for name in values}
        os.environ.update(values)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


def spawn(name: Name, target: Callable[..., None], *args: object) -> tuple[SpawnProcess, Connection]:
    """Starts ``target(connection, *args)`` in a process of its own; returns that, and the connection's other end."""
    context = multiprocessing.get_context("spawn")
    connection, theirs = context.Pipe()
    # no daemon: programs start processes of their own, as data loaders do
    process = context.Process(target=target, args=(theirs, *args), name=name)
    process.start()
    theirs.close()
    return process, connection


class Name(str):
    """The name of a process whose stacks can be read.

    Attributes:
        file: takes the stacks; it has no path, so that nothing is left whatever happens.
    """

    file: IO[bytes]
    _sent: bool

    def __new__(cls, text: str) -> Name:
        name = super().__new__(cls, text)
        name.file = tempfile.TemporaryFile()  # noqa: SIM115
        name._sent = False
        return name

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        popen = multiprocessing.context.get_spawning_popen()
        if popen is None or self._sent or not hasattr(signal, "SIGUSR1"):
            return str, (str(self),)
        self._sent = True  # it is part of what is sent after it, too
        scope = {"file": popen.duplicate_for_child(self.file.fileno()), "name": str(self)}
        return eval, (_SETUP, scope)

    def stacks(self, pid: int | None) -> str:
        if pid is None or not hasattr(signal, "SIGUSR1"):
            return ""
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
        time.sleep(_SECONDS)
        return self.written()

    def written(self) -> str:
        """Returns the end of what it has written so far."""
        size = os.fstat(self.file.fileno()).st_size
        written = os.pread(self.file.fileno(), _MOST, max(0, size - _MOST))
        return written.decode(errors="replace").partition("\nExtension modules: ")[0]

    def close(self) -> None:
        self.file.close()


_SLEEPS = ("S", "T", "t", "Z", "X")  # neither running, nor waiting for a core or a disk


def memory() -> tuple[int, int, int]:
    """Counts this process's bytes in memory now, the most that were, and the machine's; 0 if not known."""
    now, most = _kilobytes("/proc/self/status", "VmRSS:"), _kilobytes("/proc/self/status", "VmHWM:")
    return 1024 * now, 1024 * most, 1024 * _kilobytes("/proc/meminfo", "MemTotal:")


def _kilobytes(file: str, field: str) -> int:
    try:
        lines = Path(file).read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(field)), 0)


class ProcessTime:
    """Measures how long a process has had to do something: on a busy machine less than the time that has passed.

    What counts is the time for which it had a core, and that in which it slept. It does not count that others had the
    cores, or that a disk is slow.
    """

    def __init__(self, pid: int | None) -> None:
        self._pid = pid
        self._start = self._last = time.monotonic()
        self.cpu = self.slept = 0.0

    def seconds(self) -> float:
        """Counts up to now; to be asked about once a second."""
        now = time.monotonic()
        passed, self._last = now - self._last, now
        state, cpu = _state(self._pid)
        if not state:
            return now - self._start
        got, self.cpu = cpu - self.cpu, cpu
        if state in _SLEEPS:
            self.slept += max(0.0, passed - got)
        return self.cpu + self.slept

    def __str__(self) -> str:
        passed = time.monotonic() - self._start
        return f"in {passed:.0f} s it had a core for {self.cpu:.1f} s and slept for {self.slept:.1f} s"


def _state(pid: int | None) -> tuple[str, float]:
    """Returns one letter, and the seconds for which it had a core; nothing if that is not known."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", 0.0
    return fields[0], (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
