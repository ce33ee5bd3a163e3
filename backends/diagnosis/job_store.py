"""Calls of the job's store, which may never return: a TCP store waits for an answer without a limit.

If its server's machine can't be reached, or its process is stopped, the caller would hang there, whatever timeout its
process group has. So the calls are made by a thread that nobody has to wait for.
"""

from __future__ import annotations

import json
import os
import queue
import threading
from collections.abc import Callable
from typing import Any, Generic

from torch._C._distributed_c10d import Store
from torch.distributed.distributed_c10d import PrefixStore  # type: ignore[attr-defined]

from shardkit.types import StateDict, T

_AT_EXIT = 2.0  # seconds


class NoAnswer(Exception):
    """The store has not answered in time; it may do so later."""


class _StoreRequest(Generic[T]):
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
        self._asked: queue.SimpleQueue[_StoreRequest[Any] | None] = queue.SimpleQueue()
        self._overdue: _StoreRequest[Any] | None = None

    def ask(self, call: Callable[[], T], seconds: float, *, patient: bool = False) -> T:
        """``call()``, or its error.

        Args:
            patient: wait, though an earlier call is overdue.
        """
        asked = _StoreRequest(call)
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
    def _run(calls: queue.SimpleQueue[_StoreRequest[Any] | None]) -> None:
        while (asked := calls.get()) is not None:
            asked.run()
            del asked  # it holds a store


STORE_THREAD = StoreThread()


_ANSWERS = 5.0  # seconds in which the store answers
_QUESTIONS = "called"


class Board:
    """Entries by key. Once the store's server is gone it is empty and takes nothing: the collective itself fails next.

    Args:
        store: None for a group of one rank, whose board is closed.
    """

    def __init__(self, store: Store | None, name: str) -> None:
        self._store = PrefixStore(f"shardkit/{name}", store) if store is not None else None

    @property
    def is_open(self) -> bool:
        return self._store is not None

    def close(self) -> None:
        """Lets the store go, and with it the port of its server."""
        self._store = None

    def _told(self, call: Callable[[Store], T], otherwise: T) -> T:
        """Calls the store; where it does not answer in time, or is gone, ``otherwise``."""
        store = self._store
        if store is None:
            return otherwise
        try:
            return STORE_THREAD.ask(lambda: call(store), _ANSWERS)
        except NoAnswer:
            return otherwise
        except (RuntimeError, ValueError):
            self._store = None
            return otherwise

    def publish(self, key: str, entry: StateDict) -> None:
        self._told(lambda store: store.set(key, json.dumps(entry)), None)

    def read(self, key: str) -> StateDict | None:
        """None where nothing is known."""
        return (
            self._told(lambda store: json.loads(store.get(key)) if store.check([key]) else None, None) or None
        )

    def ask(self) -> int:
        """Asks the watchdogs of all ranks to say where these stand, for some seconds; returns the question's number."""
        return self._told(lambda store: int(store.add(_QUESTIONS, 1)), 0)

    def asked(self) -> int:
        """Returns how many questions there were."""
        store = self._store
        if store is None:
            return 0
        return STORE_THREAD.ask(
            lambda: int(store.add(_QUESTIONS, 0)) if store.check([_QUESTIONS]) else 0, _ANSWERS
        )
