"""What Linux tells about a process: memory, and whether it gets on. Elsewhere nothing is known."""

from __future__ import annotations

import os
import time
from pathlib import Path

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


class Progress:
    """How long a process has had to do something, which on a busy machine is less than the time that has passed.

    What counts is the time for which it had a core, and that in which it slept. It does not count that others had the
    cores, or that a disk is slow.
    """

    def __init__(self, pid: int | None) -> None:
        self._pid = pid
        self._start = self._last = time.monotonic()
        self.cpu = self.slept = 0.0

    def seconds(self) -> float:
        """Up to now; to be asked about once a second."""
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
    """One letter, and the seconds for which it had a core; nothing if that is not known."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", 0.0
    return fields[0], (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
