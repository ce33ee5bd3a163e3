"""Waits that are no collectives: for a thread, an event, a queue, or a file that another rank writes.

While a rank waits so, the others have their turn: what it waits for may need them, as a checkpoint that threads of all
ranks write together does.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from unittest import mock

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
