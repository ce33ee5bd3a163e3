"""Where a rank stands, read from its Python stack by another thread, and whether it may still come to a call.

[Note: collectives of torch's] A barrier of torch.distributed, or another library's all-reduce, is no call of ours, but
its thread's innermost Python frame lies in torch.distributed, or calls ``wait`` of a work. Torch counts what each rank
has issued in each process group: a rank with a smaller count has not come. Sends and receives concern two ranks only,
so there the partner is looked at.

[Note: who is stuck] A rank that computes, loads data, compiles or stands in a debugger is slow, not stuck, and is
waited for. A rank is taken to be lost to a call that it has not issued if for some seconds its stack has not moved and
it
 - waits in a collective of torch's to which the asking rank has not come (that rank can't, as it waits too);
 - handles an exception, or is past one, in the middle of what all ranks do together;
 - has raised an error of shardkit's own, or in a method that all ranks call together, and has issued nothing since.
It is lost at once if its program is over, or if an error took it out of what others are in (:meth:`Group.abort`).
"""

from __future__ import annotations

import contextlib
import dis
import functools
import os
import sys
import sysconfig
import threading
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from shardkit.types import StateDict

# ------------------------------------------------------------ calls, as their callers see them
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
        """Says whether two ranks' calls of the same number in the same channel can work together."""
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
    """Returns 0 for the program's own, 1 for a library's that it uses, 2 for torch's, Python's and ours."""
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


def here() -> SourceLine:
    """Returns the innermost line from the caller outwards that is the program's, or else a library's."""
    found, kind = _innermost(traceback.walk_stack(sys._getframe(1)))
    return found if kind < 2 else SourceLine("(no line of the program's)", 0, "<module>")


def place_of_error(error: BaseException) -> SourceLine:
    """Returns the innermost line that an exception passed: the program's, or else a library's, or else any."""
    return _innermost([*traceback.walk_tb(error.__traceback__)][::-1])[0]


def _innermost(stack: Iterable[tuple[FrameType, int]]) -> tuple[SourceLine, int]:
    """Returns the first line of the least kind, and that."""
    kinds = ((_kind(frame.f_code.co_filename), frame, line) for frame, line in stack)
    if (best := min(kinds, key=lambda at: at[0], default=None)) is None:
        return SourceLine("(nowhere)", 0, "<module>"), 2
    kind, frame, line = best
    return SourceLine(frame.f_code.co_filename, line, frame.f_code.co_name), kind


# ------------------------------------------------------------ a thread at one moment
_C10D = dist.distributed_c10d.__file__
_DISTRIBUTED = os.path.dirname(dist.__file__)
_WAIT_TENSOR, _INSIDE = (os.path.join(_DISTRIBUTED, "_functional_collectives.py"), "wait_tensor"), 6  # frames
_BACKENDS = os.path.dirname(os.path.dirname(__file__))
_RUN_BACKWARD: CodeType = torch.autograd.graph._engine_run_backward.__code__
_DEBUGGERS = ("pdb.py", "bdb.py", "pydevd.py", "debugger.py")
_WAITS = os.path.join("c10d", "group.py")  # the file whose frames wait in our collectives
_STILL = 2.5  # seconds after which a thread that waits has not only just begun
_STILL_IN_ERROR = 4.0  # handling an exception may take a moment


class ThreadPosition(NamedTuple):
    """A thread at one moment.

    Attributes:
        mark: the same as long as the thread has not moved.
        where: its line, for people.
        operation: the collective of torch's that it waits in; "" for none.
        group: name of that collective's process group; "" if unknown.
        peer: global rank that it waits for alone; -1 for the whole group.
        error: the exception that it is handling.
        in_backward: autograd is running.
        in_debugger: somebody is looking at it.
        has_ended: the program is over, and the interpreter waits for other threads.
    """

    mark: tuple[object, ...]
    where: str
    operation: str
    group: str
    peer: int
    error: str
    in_backward: bool
    in_debugger: bool
    has_ended: bool


def position_of(thread: int, background: int = 0) -> ThreadPosition | None:
    """Finds where a thread of that identifier stands; None if it has ended.

    Args:
        background: ``id`` of an exception that is of no interest: the program runs inside of its handler.
    """
    if (frame := sys._current_frames().get(thread)) is None:
        return None
    frames = [inner for inner, _ in traceback.walk_stack(frame)]
    operation, group, peer = _collective(frames)
    found: Any = sys._current_exceptions().get(thread)  # it is in an ``except`` or ``finally`` block
    error = found[1] if isinstance(found, tuple) else found  # a tuple before Python 3.12
    if id(error) == background:
        error = None
    place, _ = _innermost((inner, inner.f_lineno) for inner in frames)
    counts = issued_of_torch() if operation else {}
    outermost = frames[-1].f_code
    return ThreadPosition(
        (id(frame), frame.f_lasti, id(error), counts.get(group)),
        f"{place.file}:{place.line} in {place.function}",
        operation,
        group,
        peer,
        "" if error is None else f"{type(error).__name__}: {error}",
        any(f.f_code is _RUN_BACKWARD for f in frames),
        any(os.path.basename(f.f_code.co_filename) in _DEBUGGERS for f in frames),
        outermost.co_name == "_shutdown" and outermost.co_filename == threading.__file__,
    )


_uncounted: Counter[str] = Counter()


@contextlib.contextmanager
def uncounted(pg: dist.ProcessGroup) -> Iterator[None]:
    """Leaves out what this rank issues inside, alone, when collectives are counted."""
    before = _issued_in(pg)
    yield
    _uncounted[str(pg.group_name)] += _issued_in(pg) - before


def _issued_in(pg: dist.ProcessGroup) -> int:
    return int(pg._get_sequence_number_for_group())  # type: ignore[attr-defined]


def issued_of_torch() -> dict[str, int]:
    """Returns how many collectives this rank has issued in each of torch's process groups, as far as torch tells."""
    counts = {}
    if dist.is_initialized():
        for pg in list(dist.distributed_c10d._world.pg_map):
            with contextlib.suppress(RuntimeError):
                name = str(pg.group_name)
                counts[name] = _issued_in(pg) - _uncounted[name]
    return counts


# ---------------------------------------------------------------- reading a stack, innermost frame first
def _collective(frames: list[FrameType]) -> tuple[str, str, int]:
    """Returns operation, group and peer of the collective that the innermost frame waits in."""
    if _WAIT_TENSOR in [(f.f_code.co_filename, f.f_code.co_name) for f in frames[:_INSIDE]]:
        return "wait_tensor", "", -1  # as DTensors wait: which group's it is does not show
    if frames[0].f_code.co_filename != _C10D:
        # in one of the caller's variables: a work of torch's; our own calls say more themselves
        is_ours, held = frames[0].f_code.co_filename.startswith(_BACKENDS), list(frames[0].f_locals.values())
        waits = not is_ours and _called(frames[0]) == "wait"
        is_held = waits and any(isinstance(w, dist.Work) and not w.is_completed() for w in held)
        return "Work.wait" if is_held else "", "", -1
    operation, group, peer = "", "", -1
    for frame in frames:
        if not frame.f_code.co_filename.startswith(_DISTRIBUTED):
            break
        if frame.f_code.co_filename != _C10D:
            continue
        operation = frame.f_code.co_name
        values = frame.f_locals
        if "group" in values:
            found = values["group"] if values["group"] is not None else dist.group.WORLD
            group = str(getattr(found, "group_name", ""))
        if operation in ("send", "recv", "isend", "irecv"):
            other = values.get("dst", values.get("src"))
            peer = other if isinstance(other, int) else -1
    return operation, group, peer


def _called(frame: FrameType) -> str:
    """Returns the name of the attribute that the frame calls now."""
    name = ""
    for instruction in dis.get_instructions(frame.f_code):
        if instruction.offset >= frame.f_lasti:
            break
        if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            name = str(instruction.argval)
    return name


class StackReport(NamedTuple):
    """Tells the other ranks where one stands; its watchdog publishes it.

    Attributes:
        answers: the latest question that it had heard; what answers an earlier one is old.
        issued: how many calls in each channel.
        of_torch: how many collectives in each of torch's process groups.
        rank: global.
        still: seconds for which the thread has not moved.
        left: why it will not come, in its own words.
        raised: the last error of what all ranks do together, if it has issued nothing since.
        unfinished: what it has begun.
        at: where it stands.
        recent: the last calls of all channels.
    """

    answers: int
    issued: dict[str, int]
    of_torch: dict[str, int]
    rank: int
    still: float
    left: str
    raised: str
    unfinished: str
    at: ThreadPosition
    recent: Sequence[CallFacts] = ()

    @classmethod
    def of(cls, entry: StateDict) -> StackReport:
        return cls(**{**entry, "at": ThreadPosition(*entry["at"])})

    def has_passed(self, call: Call, issued: dict[str, int]) -> str:
        """Says what this rank has issued where another one, that has ``issued`` so many, wants to agree first.

        That one's ``call`` is the agreement. A verb and its object; empty if it may still come.
        """
        channel = call.channel.removesuffix(f" {AGREEMENT}")
        following = issued.get(channel, 0) + 1
        if channel == call.channel or self.issued.get(channel, 0) < following:
            return ""
        calls = [Call(*c).describe() for c in self.recent if tuple(c[:2]) == (channel, following)]
        return f"has gone on to {calls[0] if calls else f'call {following} of channel {channel!r}'}"

    def why_it_will_not_come(self, here: int) -> str:
        """Returns a verb and its object, about a rank that has not issued the call which global rank ``here`` waits in.

        Empty if it may still come. See [Note: who is stuck].
        """
        at = self.at
        if at.has_ended:
            return "has come to the end of its program"
        if self.left:
            return f"gave up: {self.left}. It stands at {at.where}"
        if at.in_debugger:
            return ""
        # its collective of torch's is one that global rank ``here`` has not come to
        waits = at.peer == here if at.peer >= 0 else is_behind(issued_of_torch(), self.of_torch, at.group)
        if at.operation and self.still >= _STILL and waits:
            others = [f for t, f in sys._current_frames().items() if t != threading.get_ident()]
            # one that is in torch.distributed may come where this thread does not
            if all(f.f_code.co_filename != _C10D for f in others):
                return f"is in torch.distributed's {at.operation}, called at {at.where}"
        if self.raised and self.still >= _STILL_IN_ERROR:
            return f"raised {self.raised}, and stands at {at.where}"
        if self.unfinished and self.still >= _STILL_IN_ERROR:
            if at.error:
                return f"handles {at.error} at {at.where}, in the middle of {self.unfinished}"
            if "raised" in self.unfinished:
                return f"left {self.unfinished}, and stands at {at.where}"
        return ""


def is_behind(mine: dict[str, int], theirs: dict[str, int], group: str) -> bool:
    """Says whether one rank has issued less than another in a process group of torch's ("": in any)."""
    groups = [group] if group else list(theirs)
    return any(g in mine and mine[g] < theirs.get(g, 0) for g in groups)


def describe_thread(thread: int) -> str:
    """Says what a thread does now: a sentence without its subject, as "waited in ..."; "" if it has ended.

    Args:
        thread: identifier of the one that trains.
    """
    position, frame = position_of(thread), sys._current_frames().get(thread)
    if position is None or frame is None:
        return ""
    if (call := _call(frame)) is not None:
        return f"waited in {call.describe()}, at {position.where}"
    if position.operation:
        return f"waited in torch.distributed's {position.operation}, at {position.where}"
    if position.error:
        return f"handled {position.error}, at {position.where}"
    return f"{'ran backward' if position.in_backward else 'stood'} at {position.where}"


def _call(innermost: FrameType) -> Call | None:
    """Returns the collective of ours that a frame or one of its callers waits in."""
    for frame, _ in traceback.walk_stack(innermost):
        if frame.f_code.co_filename.endswith(_WAITS):
            values = frame.f_locals
            found = values.get("call") or getattr(values.get("self"), "_call", None)
            if isinstance(found, tuple):
                return Call(*found)
    return None
