"""Tells of a rank that does nothing while the others wait for their turn.

It may wait for a lock of Python's that another rank holds, which has to wait itself in a collective: between processes
there is no such lock, and turns can't be passed on in it. It may as well wait for data or for a person, so nothing is
ended.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from typing import TextIO

from shardkit.backends.diagnosis.stack_report import position_of
from shardkit.backends.simulated.rank_threads import RankThreads

SECONDS = 30.0


@contextlib.contextmanager
def noticing_stillness(threads: RankThreads, seconds: float = SECONDS) -> Iterator[None]:
    """Inside, a line on stderr tells of it, once for each place."""
    over = threading.Event()
    watcher = threading.Thread(
        target=_watch, args=(threads, seconds, over, sys.stderr), name="shardkit rehearsal", daemon=True
    )
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


def _watch(threads: RankThreads, seconds: float, over: threading.Event, out: TextIO) -> None:
    last: object = None
    since, told = time.monotonic(), False
    while not over.wait(seconds / 10):
        if threads.running is None:
            continue
        rank, thread = threads.running
        position = position_of(thread.ident or 0)
        if position is None or position.in_debugger:
            continue
        mark = rank, position.mark, _cpu_seconds(thread)
        if mark != last:
            last, since, told = mark, time.monotonic(), False
        elif not told and time.monotonic() - since >= seconds:
            told = True
            out.write(
                f"rank {rank} has done nothing for {seconds:.0f} s, at {position.where}, and only one rank runs at a "
                "time. Does it wait for a lock that another rank holds? (--timeout ends the rehearsal)\n"
            )


def _cpu_seconds(thread: threading.Thread) -> float:
    """What the thread has used; 0 where the system does not tell."""
    try:
        clock = time.pthread_getcpuclockid(thread.ident or 0)
        return time.clock_gettime(clock)
    except (AttributeError, OSError):
        return 0.0
