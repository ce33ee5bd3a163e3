"""Processes seen from outside: what a spawned one gets, its stacks, and how far it gets on.

A process may hang long before it runs code of this library: while it imports the program that it was spawned by.
multiprocessing first sends a process its name. Unpickling this one needs nothing but Python's standard library, and
makes the process write its stacks on a signal.

Memory, and how long a process had a core, Linux tells; elsewhere they are not known.
"""

from __future__ import annotations

import abc
import atexit
import contextlib
import multiprocessing.context
import os
import signal
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING

from shardkit.errors import ConfigurationError

if TYPE_CHECKING:
    from typing_extensions import Self

_SECONDS = 0.5  # in which a process writes its stacks; it does so when it gets to run
_MOST = 8000  # characters shown

_environment_lock = threading.Lock()
# An expression, since it travels as such.
_SETUP = f"""(
    __import__("faulthandler").register({int(getattr(signal, "SIGUSR1", 0))}, file, True),
    name,
)[1]"""
_SETUP_AT_DEATH = f"""(__import__("faulthandler").enable(file, True), {_SETUP})[1]"""


@contextlib.contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Variables of what is spawned within this block."""
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


class Name(str):
    """The name of a process whose stacks can be read.

    Attributes:
        file: takes the stacks; it has no path, so that nothing is left whatever happens.
    """

    file: IO[bytes]
    _sent: bool
    _at_death: bool

    def __new__(cls, text: str, *, at_death: bool = False) -> Name:
        """``at_death``: the process writes its stacks when a fatal signal ends it, too."""
        name = super().__new__(cls, text)
        name.file = tempfile.TemporaryFile()  # noqa: SIM115
        name._sent, name._at_death = False, at_death
        return name

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        popen = multiprocessing.context.get_spawning_popen()
        if popen is None or self._sent or not hasattr(signal, "SIGUSR1"):
            return str, (str(self),)
        self._sent = True  # it is part of what is sent after it, too
        scope = {"file": popen.duplicate_for_child(self.file.fileno()), "name": str(self)}
        return eval, (_SETUP_AT_DEATH if self._at_death else _SETUP, scope)

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


class Pool(abc.ABC):
    """Ranks in processes that stay alive between calls, and end with this one. A context manager.

    Args:
        timeout: seconds a call may take; None: no limit.
        start_timeout: seconds in which the ranks have to be ready; None: no limit.
    """

    def __init__(self, world_size: int, timeout: float | None, start_timeout: float | None) -> None:
        if world_size < 1:
            raise ConfigurationError(f"world_size must be at least 1, got {world_size}")
        self.world_size, self.timeout, self._start_timeout = world_size, timeout, start_timeout
        _pools.add(self)

    @abc.abstractmethod
    def close(self, kill: bool = False) -> None:
        """Ends the processes; with ``kill`` at once."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close(kill=error is not None)


_pools: weakref.WeakSet[Pool] = weakref.WeakSet()


@atexit.register
def _close_pools() -> None:
    for pool in list(_pools):
        pool.close(kill=True)


_SLEEPS = ("S", "T", "t", "Z", "X")  # neither running, nor waiting for a core or a disk


def memory() -> tuple[int, int, int]:
    """Bytes of this process that are in memory now, the most that were, and all of the machine; 0 if not known."""
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
