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
import os
import sys
import sysconfig
import threading
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from .calls import AGREEMENT, Call, CallFacts, place_of

_C10D = dist.distributed_c10d.__file__
_DISTRIBUTED = os.path.dirname(dist.__file__)
_BACKENDS = os.path.dirname(os.path.dirname(__file__))
_TORCH, _PYTHON = os.path.dirname(torch.__file__), sysconfig.get_paths()["stdlib"]
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
    frame = sys._current_frames().get(thread)
    if frame is None:
        return None
    frames = [inner for inner, _ in traceback.walk_stack(frame)]
    operation, group, peer = _collective(frames)
    error = _handled(thread)
    if id(error) == background:
        error = None
    counts = issued_of_torch() if operation else {}
    outermost = frames[-1].f_code
    return ThreadPosition(
        (id(frame), frame.f_lasti, id(error), counts.get(group)),
        _where(frames),
        operation,
        group,
        peer,
        "" if error is None else f"{type(error).__name__}: {error}",
        any(f.f_code is _RUN_BACKWARD for f in frames),
        any(os.path.basename(f.f_code.co_filename) in _DEBUGGERS for f in frames),
        outermost.co_name == "_shutdown" and outermost.co_filename == threading.__file__,
    )


def others_in_collectives() -> bool:
    """Whether another thread of this process is inside of torch.distributed, and may come where this one does not."""
    here = threading.get_ident()
    return any(f.f_code.co_filename == _C10D for t, f in sys._current_frames().items() if t != here)


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
        known = list(dist.distributed_c10d._world.pg_map)
        for pg in known:
            with contextlib.suppress(RuntimeError):
                name = str(pg.group_name)
                counts[name] = _issued_in(pg) - _uncounted[name]
    return counts


# ---------------------------------------------------------------- reading a stack, innermost frame first
def _collective(frames: list[FrameType]) -> tuple[str, str, int]:
    """Operation, group and peer of the collective that the innermost frame waits in."""
    if frames[0].f_code.co_filename != _C10D:
        return _waited_work(frames[0])
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


def _waited_work(frame: FrameType) -> tuple[str, str, int]:
    """Finds them where the caller waits for a work of torch.distributed that one of its variables holds."""
    if frame.f_code.co_filename.startswith(_BACKENDS) or _called(frame) != "wait":
        return "", "", -1  # our own calls say more themselves
    for value in list(frame.f_locals.values()):
        if isinstance(value, dist.Work) and not value.is_completed():
            return "Work.wait", "", -1
    return "", "", -1


def _called(frame: FrameType) -> str:
    """Name of the attribute that the frame calls now."""
    name = ""
    for instruction in dis.get_instructions(frame.f_code):
        if instruction.offset >= frame.f_lasti:
            break
        if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            name = str(instruction.argval)
    return name


def _where(frames: list[FrameType]) -> str:
    """Returns the innermost line that is the user's: neither torch's nor Python's own."""
    own = next((f for f in frames if not f.f_code.co_filename.startswith((_TORCH, _PYTHON))), frames[0])
    return f"{own.f_code.co_filename}:{own.f_lineno} in {own.f_code.co_name}"


def _handled(thread: int) -> BaseException | None:
    """Returns the exception that a thread is handling (in an ``except`` or ``finally`` block)."""
    found: Any = sys._current_exceptions().get(thread)  # before Python 3.12 a tuple
    return found[1] if isinstance(found, tuple) else found


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
    where: str
    operation: str
    group: str
    peer: int
    error: str
    in_debugger: bool
    has_ended: bool
    recent: Sequence[CallFacts] = ()

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
        if self.has_ended:
            return "has come to the end of its program"
        if self.left:
            return f"gave up: {self.left}. It stands at {self.where}"
        if self.in_debugger:
            return ""
        if self.operation and self.still >= _STILL and self._waits_for(here) and not others_in_collectives():
            return f"is in torch.distributed's {self.operation}, called at {self.where}"
        if self.raised and self.still >= _STILL_IN_ERROR:
            return f"raised {self.raised}, and stands at {self.where}"
        if self.unfinished and self.still >= _STILL_IN_ERROR:
            if self.error:
                return f"handles {self.error} at {self.where}, in the middle of {self.unfinished}"
            if "raised" in self.unfinished:
                return f"left {self.unfinished}, and stands at {self.where}"
        return ""

    def _waits_for(self, here: int) -> bool:
        """Whether this rank's collective of torch's is one that global rank ``here`` has not come to."""
        if self.peer >= 0:
            return self.peer == here
        return is_behind(issued_of_torch(), self.of_torch, self.group)


def is_behind(mine: dict[str, int], theirs: dict[str, int], group: str) -> bool:
    """Whether one rank has issued less than another in a process group of torch's ("": in any)."""
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
    place, call = place_of(frame), _call(frame)
    where = f"{place.file}:{place.line} in {place.function}" if place.line else position.where
    if call is not None:
        return f"waited in {call.describe()}, at {where}"
    if position.operation:
        return f"waited in torch.distributed's {position.operation}, at {where}"
    if position.error:
        return f"handled {position.error}, at {where}"
    return f"{'ran backward' if position.in_backward else 'stood'} at {where}"


def _call(innermost: FrameType) -> Call | None:
    """Returns the collective of ours that a frame or one of its callers waits in."""
    for frame, _ in traceback.walk_stack(innermost):
        if frame.f_code.co_filename.endswith(_WAITS):
            values = frame.f_locals
            found = values.get("call") or getattr(values.get("self"), "_call", None)
            if isinstance(found, tuple):
                return Call(*found)
    return None
