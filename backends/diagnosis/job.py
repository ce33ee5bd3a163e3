"""The function that this process runs as a rank, or its program: others hear how it ends.

All watches of the process are known here, and the thread that serves as their witness.
"""

from __future__ import annotations

import atexit
import sys
import threading
import weakref
from types import TracebackType

from shardkit.progress import listen_to_errors, threads

from .store_thread import STORE_THREAD
from .witness import Watched, Witness

_watches: weakref.WeakSet[Watched] = weakref.WeakSet()
_number = 0
_witness = Witness(lambda: [w for w in list(_watches) if w.is_open])
_hooked = False


def number() -> int:
    """Counts the functions that this process has run as a rank."""
    return _number


def add(watch: Watched, *, witnessed: bool) -> None:
    """A new watch, which lasts as long as somebody else refers to it."""
    _watches.add(watch)
    if witnessed:
        _witness.begin()
        _publish_uncaught_errors()


def begin_job() -> None:
    """This process starts to run a function as a rank."""
    global _number
    _number += 1


def end_job() -> None:
    """The function has returned: its ranks that still wait for this one hear of it."""
    for watch in list(_watches):
        watch.leave()


def fail_job(error: BaseException) -> None:
    """An error ends the function or the program: ranks that wait for this one hear of it."""
    for watch in list(_watches):
        watch.fail_with(error)


def _note(error: BaseException) -> None:
    for watch in list(_watches):
        if watch.thread == threading.get_ident():
            watch.note_error(error)


listen_to_errors(_note)


def _publish_uncaught_errors() -> None:
    global _hooked
    if _hooked:
        return
    _hooked = True
    previous, previous_of_threads = sys.excepthook, threading.excepthook

    def publish(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        previous(kind, error, trace)
        if not isinstance(error, KeyboardInterrupt):
            fail_job(error)

    def publish_of_thread(args: threading.ExceptHookArgs) -> None:
        previous_of_threads(args)
        if args.exc_value is not None and threading.get_ident() in threads():
            fail_job(args.exc_value)

    sys.excepthook, threading.excepthook = publish, publish_of_thread


@atexit.register
def _end_witness() -> None:
    _witness.end()
    end_job()
    STORE_THREAD.end()
