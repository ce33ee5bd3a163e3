"""Waits that are no collectives: for a thread, an event, a queue, or a file that another rank writes.

While a rank waits so, the others have their turn: what it waits for may need them, as a checkpoint that threads of all
ranks write together does.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TextIO
from unittest import mock

from shardkit.backends.diagnosis.stack_report import position_of
from shardkit.backends.simulated.rank_threads import RankThreads
from shardkit.types import Tree

from .ranks import current

_WAITS = (
    (threading.Thread, "join"),
    (queue.Queue, "get"),
    (concurrent.futures.Future, "result"),
    (concurrent.futures.Future, "exception"),
    (time, "sleep"),
)
_AT_ONCE = (
    0.05  # seconds; what is there sooner, such as a thread that starts, is no reason to pass the turn on
)


@contextlib.contextmanager
def waiting_elsewhere(threads: RankThreads) -> Iterator[None]:
    """Inside, these waits of a rank's thread pass its turn on."""

    def passing_on(wait: Callable[..., Tree]) -> Callable[..., Tree]:
        @functools.wraps(wait)
        def waiting(*args: object, **kwargs: object) -> Tree:
            rank = current()
            if rank is None or not threads.is_mine(rank.number):
                return wait(*args, **kwargs)
            with threads.away(rank.number):
                return wait(*args, **kwargs)

        return waiting

    wait_for_event = threading.Event.wait

    def event_wait(event: threading.Event, timeout: float | None = None) -> bool:
        first = _AT_ONCE if timeout is None else min(timeout, _AT_ONCE)
        return wait_for_event(event, first) or passing_on(wait_for_event)(event, timeout)

    with ExitStack() as stack:
        for owner, name in _WAITS:
            stack.enter_context(mock.patch.object(owner, name, passing_on(getattr(owner, name))))
        stack.enter_context(mock.patch.object(threading.Event, "wait", event_wait))
        yield


# ------------------------------------------------------------ ranks that do nothing
# Such a rank may wait for a lock of Python's that another rank holds, which has to wait itself in a collective: between
# processes there is no such lock, and turns can't be passed on in it. It may as well wait for data or for a person, so
# nothing is ended.
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
    """Returns what the thread has used; 0 where the system does not tell."""
    try:
        clock = time.pthread_getcpuclockid(thread.ident or 0)
        return time.clock_gettime(clock)
    except (AttributeError, OSError):
        return 0.0
