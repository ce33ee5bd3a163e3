"""How busy the machine is, and with whose work (Linux; elsewhere nothing is known and every block counts)."""

from __future__ import annotations

import os
import time

QUIET = 0.10  # a block counts as quiet below this share of the machine used by others
_SAMPLE_SECONDS = 0.25


def busy_seconds() -> float | None:
    """CPU seconds that this machine has worked since it started, over all cores; None where unknown."""
    try:
        with open("/proc/stat") as file:
            user, nice, system, _, _, interrupts, soft, stolen = map(int, file.readline().split()[1:9])
    except (OSError, ValueError):
        return None
    return (user + nice + system + interrupts + soft + stolen) / os.sysconf("SC_CLK_TCK")


class Foreign:
    """Share of the machine that others use between construction and :meth:`share`."""

    def __init__(self) -> None:
        self._busy, self._began, self._own = busy_seconds(), time.perf_counter(), time.process_time()

    def share(self, own: float = 0.0) -> float | None:
        """Share from 0 to 1, besides this process and ``own`` CPU seconds of its ranks."""
        busy = busy_seconds()
        if busy is None or self._busy is None:
            return None
        own += time.process_time() - self._own
        capacity = (time.perf_counter() - self._began) * (os.cpu_count() or 1)
        return min(1.0, max(0.0, (busy - self._busy - own) / capacity))


class Patience:
    """Waits for others to be done, for a limited time in all.

    Attributes:
        left: seconds that may still be spent.
    """

    def __init__(self, seconds: float) -> None:
        self.left = seconds

    def wait_for_quiet(self) -> None:
        while self.left > 0:
            watch, began = Foreign(), time.perf_counter()
            time.sleep(_SAMPLE_SECONDS)
            self.left -= time.perf_counter() - began
            share = watch.share()
            if share is None or share < QUIET:
                return
