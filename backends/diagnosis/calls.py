"""A collective as its caller sees it, on which line that is, and what a rank publishes of those that it has issued."""

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

from shardkit.types import StateDict

AGREEMENT = "(agreement on the next call)"  # ends the names of channels in which nothing is sent
_FREE_SIZES = ("all_to_all",)  # ranks may send different numbers of elements


CallFacts = tuple[str, int, str, int, str]  # a call as it is noted: what a Call has


class Call(NamedTuple):
    """A collective as its caller sees it."""

    channel: str
    sequence: int  # counts calls in the channel
    operation: str
    numel: int
    label: str

    def describe(self) -> str:
        what = f" ({self.label})" if self.label else ""
        size = f" of {self.numel} elements" if self.numel else ""
        return f"{self.operation}{size}{what}, call {self.sequence} of channel {self.channel!r}"

    def meets(self, other: Call) -> bool:
        """Whether two ranks' calls of the same number in the same channel can work together."""
        if self.channel.endswith(AGREEMENT):
            return self[2:] == other[2:]
        same_size = self.numel == other.numel or self.operation in _FREE_SIZES
        return self.operation == other.operation and same_size


class WaitReport(NamedTuple):
    """Published by a rank that waits, or has left."""

    beat: int  # counts its reports
    waits: Call | None  # None: it has left
    issued: dict[str, int]  # how many calls in each channel
    recent: list[Call]  # the last ones of all channels
    job: int  # counts the functions it was launched for

    @classmethod
    def of(cls, entry: StateDict) -> WaitReport:
        waits = Call(*entry["waits"]) if entry["waits"] else None
        recent = [Call(*call) for call in entry["recent"]]
        return cls(entry["beat"], waits, entry["issued"], recent, entry["job"])

    def has_issued(self, call: Call) -> bool:
        return self.issued.get(call.channel, 0) >= call.sequence

    def contradiction(self, call: Call) -> Call | None:
        """Returns what this rank issued in the place of another rank's ``call``, if they can't meet."""
        place = call[:2]
        return next((c for c in self.recent if c[:2] == place and not c.meets(call)), None)


# ------------------------------------------------------------ where a program is when it communicates
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
