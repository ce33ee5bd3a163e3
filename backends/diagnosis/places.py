"""Where a rank's program is when it communicates: the line that its author wrote."""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterable
from types import FrameType
from typing import NamedTuple

import torch

_OURS = os.path.realpath(os.path.join(os.path.dirname(__file__), "..", ".."))  # shardkit, or a checkout
_PACKAGES = tuple(os.path.join(_OURS, name) + os.sep for name in ("shardkit", "backends", "compat"))
_EXAMPLES = os.sep + os.path.join("shardkit", "examples") + os.sep
_TORCH = os.path.dirname(os.path.realpath(torch.__file__)) + os.sep
_PYTHON = os.path.realpath(sysconfig.get_paths()["stdlib"]) + os.sep
_SITE = os.sep + "site-packages" + os.sep


class SourceLine(NamedTuple):
    file: str
    line: int
    function: str

    def __str__(self) -> str:
        if not self.line:
            return self.file
        inside = "" if self.function == "<module>" else f" in {self.function}"
        return f"{_shortened(self.file)}:{self.line}{inside}"


@functools.cache
def _kind(file: str) -> int:
    """0: the program's own; 1: a library's that it uses; 2: torch's, Python's and ours."""
    path = os.path.realpath(file)
    if file == "<string>":
        return 1  # written by a library, as dataclasses do
    if _EXAMPLES in path:
        return 0
    if file.startswith("<frozen") or path.startswith(_TORCH):
        return 2
    if path.startswith(_PACKAGES) or (_SITE + "shardkit" + os.sep) in path:
        return 2
    if _SITE in path:
        return 1
    return 2 if path.startswith(_PYTHON) else 0


@functools.cache
def _shortened(file: str) -> str:
    near = os.path.relpath(file) if os.path.isabs(file) else file
    return file if near.startswith(os.pardir) else near


def place_of(frame: FrameType | None) -> SourceLine:
    """Returns the innermost line from ``frame`` outwards that is the program's, or else a library's."""
    found, kind = _innermost(() if frame is None else traceback.walk_stack(frame))
    return found if kind < 2 else SourceLine("(no line of the program's)", 0, "<module>")


def here() -> SourceLine:
    """Finds the line of the caller's thread."""
    return place_of(sys._getframe(1))


def place_of_error(error: BaseException) -> SourceLine:
    """Returns the innermost line that an exception passed: the program's, or else a library's, or else any."""
    return _innermost([*traceback.walk_tb(error.__traceback__)][::-1])[0]


def _innermost(stack: Iterable[tuple[FrameType, int]]) -> tuple[SourceLine, int]:
    """Returns the first line of the least kind, and that."""
    kinds = ((_kind(frame.f_code.co_filename), frame, line) for frame, line in stack)
    best = min(kinds, key=lambda at: at[0], default=None)
    if best is None:
        return SourceLine("(nowhere)", 0, "<module>"), 2
    kind, frame, line = best
    return SourceLine(frame.f_code.co_filename, line, frame.f_code.co_name), kind
