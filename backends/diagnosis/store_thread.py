"""Calls of the job's store, which may never return: a TCP store waits for an answer without a limit.

If its server's machine can't be reached, or its process is stopped, the caller would hang there, whatever timeout its
process group has. So the calls are made by a thread that nobody has to wait for.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from typing import Any, Generic

from shardkit.types import T

_AT_EXIT = 2.0  # seconds


class NoAnswer(Exception):
    """The store has not answered in time; it may do so later."""


class _Asked(Generic[T]):
    def __init__(self, call: Callable[[], T]) -> None:
        self.call = call
        self.is_done = threading.Event()
        self.value: T
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.value = self.call()
        except BaseException as error:  # noqa: BLE001 - the asker's
            self.error = error
        self.is_done.set()


class StoreThread:
    """Makes calls for others; starts when it is first needed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process = 0
        self._thread: threading.Thread | None = None
        self._asked: queue.SimpleQueue[_Asked[Any] | None] = queue.SimpleQueue()
        self._overdue: _Asked[Any] | None = None

    def ask(self, call: Callable[[], T], seconds: float, *, patient: bool = False) -> T:
        """``call()``, or its error.

        Args:
            patient: wait, though an earlier call is overdue.

        Raises:
            NoAnswer: it takes longer.
        """
        asked = _Asked(call)
        overdue = self._overdue
        if (
            not patient
            and overdue is not None
            and not overdue.is_done.is_set()
            and self._process == os.getpid()
        ):
            raise NoAnswer
        self._begin()
        self._asked.put(asked)
        if not asked.is_done.wait(seconds):
            self._overdue = asked
            raise NoAnswer
        if asked.error is not None:
            raise asked.error
        return asked.value

    def end(self) -> None:
        """Before the interpreter ends: a thread that comes back from the store then would abort the process."""
        with self._lock:
            thread, self._thread = self._thread, None
            self._asked.put(None)
        if thread is not None and self._process == os.getpid():
            thread.join(_AT_EXIT)

    def _begin(self) -> None:
        with self._lock:
            if self._thread is None or self._process != os.getpid():
                self._process, self._asked, self._overdue = os.getpid(), queue.SimpleQueue(), None
                self._thread = threading.Thread(
                    target=self._run, args=(self._asked,), name="shardkit-store", daemon=True
                )
                self._thread.start()

    @staticmethod
    def _run(calls: queue.SimpleQueue[_Asked[Any] | None]) -> None:
        while (asked := calls.get()) is not None:
            asked.run()
            del asked  # it holds a store


STORE_THREAD = StoreThread()
