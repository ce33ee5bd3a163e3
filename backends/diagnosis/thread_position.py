"""Where the Python of a thread stands, read from another thread.

[Note: collectives of torch's] A barrier of torch.distributed, or another library's all-reduce, is no call of ours, but
its thread's innermost Python frame lies in torch.distributed, or calls ``wait`` of a work. Torch counts what each rank
has issued in each process group: a rank with a smaller count has not come. Sends and receives concern two ranks only,
so there the partner is looked at.
"""

from __future__ import annotations

import contextlib
import datetime
import dis
import os
import sys
import sysconfig
import threading
from collections import Counter
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

_C10D = dist.distributed_c10d.__file__
_DISTRIBUTED = os.path.dirname(dist.__file__)
_BACKENDS = os.path.dirname(os.path.dirname(__file__))
_LIBRARIES = (os.path.dirname(torch.__file__), sysconfig.get_paths()["stdlib"])
_RUN_BACKWARD: CodeType = torch.autograd.graph._engine_run_backward.__code__
_DEBUGGERS = ("pdb.py", "bdb.py", "pydevd.py", "debugger.py")
_NOTHING = datetime.timedelta(milliseconds=1)


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
    """Where a thread of that identifier stands; None if it has ended.

    Args:
        background: ``id`` of an exception that is of no interest: the program runs inside of its handler.
    """
    frame = sys._current_frames().get(thread)
    if frame is None:
        return None
    frames = []
    inner: FrameType | None = frame
    while inner is not None:
        frames.append(inner)
        inner = inner.f_back
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
    """What this rank issues inside, alone, does not count as a collective."""
    before = _issued_in(pg)
    yield
    _uncounted[str(pg.group_name)] += _issued_in(pg) - before


def _issued_in(pg: dist.ProcessGroup) -> int:
    return int(pg._get_sequence_number_for_group())  # type: ignore[attr-defined]


def issued_of_torch() -> dict[str, int]:
    """How many collectives this rank has issued in each of torch's process groups, as far as torch tells."""
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
    """The same where the caller waits for a work of torch.distributed that one of its variables holds."""
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
    """The innermost line that is the user's: neither torch's nor Python's own."""
    own = next((f for f in frames if not f.f_code.co_filename.startswith(_LIBRARIES)), frames[0])
    return f"{own.f_code.co_filename}:{own.f_lineno} in {own.f_code.co_name}"


def _handled(thread: int) -> BaseException | None:
    """The exception that a thread is handling (in an ``except`` or ``finally`` block)."""
    found: Any = sys._current_exceptions().get(thread)  # before Python 3.12 a tuple
    return found[1] if isinstance(found, tuple) else found
