"""What this process has begun and not brought to its end, for whoever asks why others wait for it."""

from __future__ import annotations

import weakref
from typing import Protocol


class Unfinished(Protocol):
    """Something that has a beginning and an end on all ranks."""

    def unfinished(self, in_backward: bool) -> str:
        """What was begun and has not ended; "" for nothing.

        Args:
            in_backward: autograd runs now, so that a backward in progress is no sign of anything.
        """
        ...


_all: weakref.WeakSet[Unfinished] = weakref.WeakSet()


def observe(what: Unfinished) -> None:
    """It may be asked from now on, from any thread, as long as it lives."""
    _all.add(what)


def unfinished(in_backward: bool) -> str:
    """The first thing that has not ended; "" if there is none."""
    for what in list(_all):
        text = what.unfinished(in_backward)
        if text:
            return text
    return ""
