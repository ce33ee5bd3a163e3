"""Who called, where torch or another library leaves no other way to tell what is wanted."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType


def callers() -> Iterator[FrameType]:
    """The frames around the function that iterates, innermost first: its caller, the caller of that, and so on."""
    frame = sys._getframe(1).f_back
    while frame is not None:
        yield frame
        frame = frame.f_back
