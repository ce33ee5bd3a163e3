"""A thread that says where this rank stands when others wait for it, and finds waits that are in vain.

[Note: the witness] A rank that waits in a collective of torch's, handles an exception, or computes, can't say so
itself. One thread a process looks each second whether anybody has asked (one question to the store), and while
somebody does, publishes where the rank's Python stands and for how long it has not moved. It starts with the first
watch and ends with the last; while nobody waits for longer than two seconds, it reads no stack.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from .store_thread import NoAnswer
from .thread_position import ThreadPosition

_PERIOD = 1.0  # seconds between looks, and
_PERIOD_WHEN_ASKED = 0.5


class Watched(Protocol):
    """A group's watch, as its process sees it."""

    thread: int

    @property
    def is_open(self) -> bool: ...

    def attend(self) -> bool: ...

    def leave(self) -> None: ...

    def fail_with(self, error: BaseException) -> None: ...

    def note_error(self, error: BaseException) -> None: ...


class Stillness:
    """For how long a thread has not moved, as far as it was looked at."""

    def __init__(self) -> None:
        self._mark: tuple[object, ...] | None = None
        self._since = 0.0

    def seconds(self, position: ThreadPosition) -> float:
        """To be called with each new look."""
        now = time.monotonic()
        if position.mark != self._mark:
            self._mark, self._since = position.mark, now
        return now - self._since


class Witness:
    """The thread. See [Note: the witness]."""

    def __init__(self, watches: Callable[[], Sequence[Watched]]) -> None:
        self._watches = watches
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._process = 0
        self._stop = threading.Event()

    def begin(self) -> None:
        """There is a new watch."""
        with self._lock:
            if self._thread is None or self._process != os.getpid():
                self._process, self._stop = os.getpid(), threading.Event()
                self._thread = threading.Thread(target=self._run, name="shardkit-witness", daemon=True)
                self._thread.start()

    def end(self) -> None:
        """Before the interpreter ends: a thread that comes back from the store then would abort the process."""
        with self._lock:
            thread, self._thread = self._thread, None
            self._stop.set()
        if thread is not None and self._process == os.getpid() and thread is not threading.current_thread():
            thread.join(2 * _PERIOD)

    def _run(self) -> None:
        stop, asked = self._stop, False
        while not stop.wait(_PERIOD_WHEN_ASKED if asked else _PERIOD):
            with self._lock:
                if stop.is_set():
                    return
                watches = self._watches()
                if not watches:
                    self._thread = None
                    return
            asked = False
            for watch in watches:
                with contextlib.suppress(RuntimeError, ValueError, NoAnswer):
                    asked = watch.attend() or asked
            del watches, watch  # they would live until the next look
