"""Tells what this process has begun and not brought to its end, for whoever asks why others wait for it."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

_all: weakref.WeakSet[Any] = weakref.WeakSet()  # what has a beginning and an end on all ranks


def observe(what: object) -> None:
    """Lets it be asked, as long as it lives, for its ``thread``, and for what is ``unfinished(in_backward)``."""
    _all.add(what)


def unfinished(in_backward: bool) -> str:
    """Names the first thing that was begun and has not ended; "" if there is none.

    Args:
        in_backward: autograd runs now, so that a backward in progress is no sign of anything.
    """
    for what in list(_all):
        text: str = what.unfinished(in_backward)
        if text:
            return text
    return ""


def threads() -> set[int]:
    """Lists those that do what all ranks do together."""
    return {what.thread for what in list(_all)}


_listeners: list[Callable[[BaseException], None]] = []


def listen_to_errors(listener: Callable[[BaseException], None]) -> None:
    """``listener`` is called with every error that :func:`note_error` gets."""
    _listeners.append(listener)


def note_error(error: BaseException) -> None:
    """Notes that an error takes this rank out of what all ranks do together, unless it goes on to another collective.

    Nobody is told before others wait for it, and it has stood still for some seconds.
    """
    for listener in _listeners:
        with contextlib.suppress(Exception):  # else its own error would hide the one that it is told of
            listener(error)
