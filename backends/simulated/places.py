"""Where a rank's program is when it communicates: the line that its author wrote."""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
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
    """Returns the innermost line from ``frame`` outwards that is the program's, or else a library's, or else any."""
    best: tuple[int, FrameType] | None = None
    while frame is not None:
        kind = _kind(frame.f_code.co_filename)
        if best is None or kind < best[0]:
            best = kind, frame
            if kind == 0:
                break
        frame = frame.f_back
    if best is None or best[0] == 2:
        return SourceLine("(no line of the program's)", 0, "<module>")
    code = best[1].f_code
    return SourceLine(code.co_filename, best[1].f_lineno, code.co_name)


def here() -> SourceLine:
    """Finds the line of the caller's thread."""
    return place_of(sys._getframe(1))


def place_of_error(error: BaseException) -> SourceLine:
    """Returns the innermost line of the program's that an exception passed."""
    trace, best = error.__traceback__, None
    while trace is not None:
        kind = _kind(trace.tb_frame.f_code.co_filename)
        if best is None or kind <= best[0]:
            best = (
                kind,
                SourceLine(trace.tb_frame.f_code.co_filename, trace.tb_lineno, trace.tb_frame.f_code.co_name),
            )
        trace = trace.tb_next
    return SourceLine("(nowhere)", 0, "<module>") if best is None else best[1]
