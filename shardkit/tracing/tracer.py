"""Traces: records of one rank, in the form in which they travel (a part); parts of all ranks put together as one file;
and that read back: what each rank's training thread did at every moment.

The file is in the trace event format, which Perfetto and chrome://tracing read. A rank is a process there, its threads
and its device are tracks. Times are on rank 0's clock, in microseconds from the first event. What backward computes
between two units has no range of its own on a rank: a moment says that backward goes into a unit, and the unit's range
lasts until the next moment.

[Note: places] Ranges nest. At each moment the innermost one counts, and says what the rank does: it waits, or it works
for a place: a phase and a unit, of the innermost range around that computes (``forward``, ``backward``, ``step``, ...).
Outside of all ranges a phase follows from what is around: what comes after a step and before a forward is ``between
steps``, what comes after a forward and before a backward is ``loss``.

[Note: clocks of ranks] A message can't arrive before it was sent. Every rank says its time to all others, several
times; what it reads on its own clock when the others' times are there is an upper bound of the difference, in both
directions. The quickest message each way gives the narrowest bounds, and the middle between them errs by at most half
their distance.

:func:`trace`, or the variable ``SHARDKIT_TRACE``, traces some steps of a training on all ranks, into one file. Steps
are those of the optimizer that steps first. While somebody asks, data loaders are heard too, and in models that are not
cut into units hooks on layers say where forward and backward are.
"""

from __future__ import annotations

import atexit
import functools
import json
import logging
import math
import os
import platform
import re
import socket
import struct
import sys
import threading
import weakref
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeAlias, TypedDict

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from ..backend import Backend, Group, backend_of_job
from ..errors import ConfigurationError, DamagedFileError, RankMismatchError
from ..launching import write_at_once
from ..types import AnyCallable, Args, Framework, Kwargs, ProcessGroup, Tree
from .ranges import Heard, What, leave, listen, now, stop_listening

_ROUNDS = 8  # of messages, by which clocks are compared


class ClockReading(NamedTuple):
    """One comparison of clocks.

    Attributes:
        at: when, on this rank's clock, in ns.
        ahead: of rank 0's clock, in ns.
        error: at most, in ns.
    """

    at: int
    ahead: float
    error: float


def compare_clocks(group: Group) -> ClockReading:
    """Compares the clocks of this rank and rank 0 (collective)."""
    if group.world_size == 1:
        return ClockReading(now(), 0.0, 0.0)
    control = group.channel("control")
    bounds = [2**62] * group.world_size  # this rank's clock minus the other's is at most that
    for _ in range(_ROUNDS):
        sent = now()
        answers = control.all_gather_bytes(struct.pack("<q", sent), label="clocks of ranks")
        arrived = now()
        for rank, answer in enumerate(answers):
            bounds[rank] = min(bounds[rank], arrived - struct.unpack("<q", answer)[0])
    form = f"<{group.world_size}q"
    rows = control.all_gather_bytes(struct.pack(form, *bounds), label="differences of clocks")
    table = [struct.unpack(form, row) for row in rows]
    most, least = table[group.rank][0], -table[0][group.rank]
    if group.rank == 0:
        return ClockReading(now(), 0.0, 0.0)
    return ClockReading(now(), (most + least) / 2, (most - least) / 2)


def on_rank_0(time: int, readings: list[ClockReading]) -> float:
    """Converts ``time`` of this rank's clock to rank 0's: clocks that drift, drift evenly between two readings."""
    if not readings:
        return float(time)
    first, last = readings[0], readings[-1]
    if last.at <= first.at or abs(last.ahead - first.ahead) <= first.error + last.error:
        best = min(readings, key=lambda reading: reading.error)
        return time - best.ahead  # no drift that could be told from the error
    part = min(1.0, max(0.0, (time - first.at) / (last.at - first.at)))
    return time - (first.ahead + part * (last.ahead - first.ahead))


FORMAT = 1


class TracePart(TypedDict):
    """One rank's records, as JSON has them.

    ``whats``: [kind, unit, ranks, nbytes]; ``events``: [number of what, start, end, thread, device start, device end],
    times in ns on the rank's clock, those of the device on the same clock or None; ``steps``: [number, when it ended];
    ``clock``: readings of it.
    """

    format: int
    rank: int
    world_size: int
    backend: str
    host: str
    process: int
    torch: str
    began: int
    ended: int
    threads: list[int]
    whats: list[tuple[str, str, tuple[int, ...], int]]
    events: list[tuple[int, int, int, int, float | None, float | None]]
    steps: list[tuple[int, int]]
    clock: list[tuple[int, float, float]]


class _Event(NamedTuple):
    what: What
    start: int
    end: int
    thread: int
    marks: tuple[object, object] | None


class Recorder:
    """Listens to one rank, and keeps all it hears.

    Attributes:
        events: in the order of their ends.
        steps: number of each step that ended, and when.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self.events: list[_Event] = []
        self.steps: list[tuple[int, int]] = []
        self.clock: list[ClockReading] = []
        self.thread = threading.get_ident()
        self.began = now()
        self.ended = 0
        self._timer = group.backend.timer()
        self.mark: Callable[[], object] | None = None
        if self._timer is not None:
            self.mark = self._timer.mark
            group.backend.synchronize()
            self._zero = self._timer.mark(), now()

    def on_range(self, what: What, start: int, end: int, marks: tuple[object, object] | None) -> None:
        self.events.append(_Event(what, start, end, threading.get_ident(), marks))

    def on_number(self, name: str, value: torch.Tensor) -> None:
        """Does nothing: numbers are for metrics."""

    def part(self) -> TracePart:
        """Returns everything, in the form that travels."""
        if self._timer is not None:
            self._group.backend.synchronize()
        numbers: dict[What, int] = {}
        threads = {self.thread: 0}
        events = []
        for what, start, end, thread, marks in self.events:
            number = numbers.setdefault(what, len(numbers))
            track = threads.setdefault(thread, len(threads))
            events.append((number, start, end, track, *self._on_device(marks)))
        group = self._group
        return TracePart(
            format=FORMAT,
            rank=group.ranks[group.rank],
            world_size=group.world_size,
            backend=group.backend.name,
            host=socket.gethostname(),
            process=os.getpid(),
            torch=f"{torch.__version__} ({platform.python_version()})",
            began=self.began,
            ended=self.ended or now(),
            threads=list(range(len(threads))),
            whats=[(w.kind, w.unit, w.ranks, w.nbytes) for w in numbers],
            events=events,
            steps=list(self.steps),
            clock=[(r.at, r.ahead, r.error) for r in self.clock],
        )

    def _on_device(self, marks: tuple[object, object] | None) -> tuple[float | None, float | None]:
        if marks is None or self._timer is None:
            return None, None
        (zero, at), timer = self._zero, self._timer
        return at + timer.seconds(zero, marks[0]) * 1e9, at + timer.seconds(zero, marks[1]) * 1e9


def part_path(path: Path, rank: int) -> Path:
    """Names the file in which a rank's own part is written if the ranks can't put theirs together."""
    return path.with_name(f"{path.stem}.rank-{rank}{path.suffix}")


def read_part(path: Path) -> TracePart:
    """Returns a part from its file."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise DamagedFileError(f"{path} is no trace: {error}") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT or "whats" not in found:
        raise DamagedFileError(f"{path} is no part of a trace of shardkit's (format {FORMAT})")
    part: TracePart = found  # type: ignore[assignment]
    return part


Json: TypeAlias = Kwargs
_DEVICE, _STEPS = 1000, 1001  # numbers of tracks


class Slice(NamedTuple):
    """A range on rank 0's clock; start and end in microseconds."""

    what: What
    start: float
    end: float
    thread: int
    device: tuple[float, float] | None


def merged(parts: Sequence[TracePart]) -> Json:
    # processes of one machine have one clock, unless what was measured speaks against it
    host = parts[0]["host"]
    parts = [
        {**part, "clock": []}
        if part["host"] == host and all(abs(ahead) <= error for _, ahead, error in part["clock"])
        else part
        for part in parts
    ]
    starts = [_clock(part, 0.0)(start) for part in parts for _, start, *_ in part["events"]]
    origin = min(starts, default=0.0)
    slices = {part["rank"]: _slices(part, origin) for part in parts}
    events: list[Json] = []
    for part in parts:
        rank, of_rank = part["rank"], slices[part["rank"]]
        events += [*_tracks(part), *_steps(part, origin), *(_shown(rank, s) for s in of_rank)]
        events += _in_flight(rank, of_rank)
        for s in of_rank:  # ranges nest on the host; their marks on one stream are in the same order
            if s.device is not None and s.what.kind != "backward":
                events.append(_bar("device", s.what.name, rank, _DEVICE, *s.device))
    # lines between the same collective on its ranks, from the first that came to the last
    for number, (what, arrivals) in enumerate(collectives(slices)):
        same: Json = {"cat": "collective", "name": what.name, "id": number}
        in_order = sorted(arrivals.items(), key=lambda item: item[1].start)
        for place, (rank, s) in enumerate(in_order):
            last = place == len(in_order) - 1
            phase: Json = {"ph": "f", "bp": "e"} if last else {"ph": "t" if place else "s"}
            events.append({**same, **phase, "pid": rank, "tid": s.thread + 1, "ts": round(s.start, 3)})
    return {
        "displayTimeUnit": "ms",
        "traceEvents": events,
        "otherData": {
            "shardkit": FORMAT,
            "ranks": [part["rank"] for part in parts],
            "world_size": parts[0]["world_size"],
            "backend": parts[0]["backend"],
            "torch": parts[0]["torch"],
            "takes_turns": len(parts) > 1 and len({(part["host"], part["process"]) for part in parts}) == 1,
            "hosts": {str(part["rank"]): part["host"] for part in parts},
            "clock_error_us": {
                str(part["rank"]): min((error for _, _, error in part["clock"]), default=0.0) / 1e3
                for part in parts
            },
        },
    }


def _clock(part: TracePart, origin: float) -> Callable[[float], float]:
    """Turns a time of this rank's into microseconds of rank 0's clock since the origin."""
    readings = [ClockReading(*reading) for reading in part["clock"]]
    return lambda time: on_rank_0(int(time), readings) / 1e3 - origin


def _slices(part: TracePart, origin: float) -> list[Slice]:
    whats = [What(kind, unit, tuple(ranks), nbytes) for kind, unit, ranks, nbytes in part["whats"]]
    at, found = _clock(part, origin), []
    for number, start, end, thread, first, last in part["events"]:
        device = None if first is None or last is None else (at(first), at(last))
        found.append(Slice(whats[number], at(start), at(end), thread, device))
    found.sort(key=lambda s: (s.thread, s.start, -s.end))
    ended = at(part["ended"])
    return [s for thread in part["threads"] for s in _nested([s for s in found if s.thread == thread], ended)]


def _nested(slices: Iterable[Slice], ended: float) -> Iterator[Slice]:
    """Turns moments of backward into ranges; what begins in a range ends in it."""
    around: list[float] = []  # ends of ranges that are open
    moment: tuple[Slice, list[float]] | None = None  # and what it is inside of
    for s in slices:
        while around and around[-1] <= s.start:
            around.pop()
        end = min([s.end, *around])
        if moment is not None:
            inner, ends = moment[0].what.unit, moment[1]
            is_within = s.what.unit == "root" or inner.startswith(s.what.unit + ".")
            if s.what.kind == "backward" and is_within:
                continue  # backward goes from the outside in: both have the same output
            ends_it = s.what.kind in ("backward", "backward.end", "step", "data")
            if ends_it or any(end <= s.start for end in ends):
                yield _lasting(moment, s.start)
                moment = None
        if s.what.kind == "backward":
            moment = (s, list(around))
        else:
            yield s._replace(end=end)
            around.append(end)
    if moment is not None:
        yield _lasting(moment, ended)


def _lasting(moment: tuple[Slice, list[float]], until: float) -> Slice:
    return moment[0]._replace(end=min([until, *moment[1]]))


# ------------------------------------------------------------ events
def _tracks(part: TracePart) -> Iterator[Json]:
    rank = part["rank"]
    yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank} ({part['host']})"}}
    yield {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}}
    names = {_STEPS: "steps"}
    for number in part["threads"]:
        names[number + 1] = "training" if number == 0 else f"thread {number}"
    if any(event[4] is not None for event in part["events"]):
        names[_DEVICE] = "device, stream of computation"
    for number, name in names.items():
        yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": number, "args": {"name": name}}


def _bar(category: str, name: str, rank: int, track: int, start: float, end: float) -> Json:
    when = {"ts": round(start, 3), "dur": round(max(0.0, end - start), 3)}
    return {"ph": "X", "cat": category, "name": name, "pid": rank, "tid": track, **when}


def _steps(part: TracePart, origin: float) -> Iterator[Json]:
    at = _clock(part, origin)
    start = at(part["began"])
    for number, ended in part["steps"]:
        end = at(ended)
        yield {**_bar("steps", f"step {number}", part["rank"], _STEPS, start, end), "args": {"step": number}}
        start = end


def _shown(rank: int, s: Slice) -> Json:
    args: Json = {"kind": s.what.kind, "unit": s.what.unit}
    if s.what.ranks:
        args["ranks"] = list(s.what.ranks)
    if s.what.nbytes:
        args["bytes"] = s.what.nbytes
    if s.device is not None:
        args["device_us"] = round(s.device[1] - s.device[0], 3)
    return {**_bar("shardkit", s.what.name, rank, s.thread + 1, s.start, s.end), "args": args}


def _in_flight(rank: int, slices: Sequence[Slice]) -> Iterator[Json]:
    """Yields spans from when a collective was issued to when this rank had waited for it; these overlap."""
    waits = [s for s in slices if s.what.kind.endswith(".wait")]
    issued: dict[tuple[str, str], Slice] = {}
    number = 0
    for s in sorted([*waits, *(s for s in slices if s.what.nbytes)], key=lambda s: s.start):
        key = (s.what.kind.removesuffix(".wait"), s.what.unit)
        if not s.what.kind.endswith(".wait"):
            issued[key] = s
        elif key in issued:
            begun = issued.pop(key)
            number += 1
            same: Json = {"cat": "in flight", "name": begun.what.name, "pid": rank, "id": f"{rank}.{number}"}
            yield {**same, "ph": "b", "ts": round(begun.start, 3)}
            yield {**same, "ph": "e", "ts": round(s.end, 3)}


def collectives(slices: dict[int, list[Slice]]) -> list[tuple[What, dict[int, Slice]]]:
    """Lists those that all of their ranks have come to, with each rank's range, in the order of issue."""
    counts: dict[tuple[int, What], int] = defaultdict(int)
    found: dict[tuple[What, int], dict[int, Slice]] = defaultdict(dict)
    for rank, of_rank in slices.items():
        for s in sorted(of_rank, key=lambda s: s.start):
            if s.what.ranks and is_collective(s.what.kind):
                found[s.what, counts[rank, s.what]][rank] = s
                counts[rank, s.what] += 1
    met = [(what, ranks) for (what, _), ranks in found.items() if len(ranks) > 1]
    complete = [(what, ranks) for what, ranks in met if len(ranks) == len(what.ranks)]
    return sorted(complete, key=lambda item: min(s.start for s in item[1].values()))


def is_collective(kind: str) -> bool:
    """Says whether ranks meet where such a range begins."""
    return kind in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "summon")


WAITING = ("all_reduce", "broadcast", "summon")  # collectives that are issued and waited for in one
COMPUTING = ("forward", "backward", "step", "update", "data", "clip", "backward.end", "range")


class StepPlace(NamedTuple):
    """Tells where a rank is in a step."""

    phase: str
    unit: str

    def __str__(self) -> str:
        named = {"data": "data loading", "backward.end": "end of backward", "clip": "clipping"}
        phase = named.get(self.phase, self.phase)
        if self.phase == "range":
            return f"{self.unit!r}"
        return phase if not self.unit or self.phase in named else f"{phase} of {self.unit}"


class Activity(NamedTuple):
    """A piece of a rank's time in which it does one thing; in microseconds.

    Attributes:
        wait: of what it waits for, ``all_gather(layers.1)``; "" where it works.
        device: how long the device waited, where it tells.
    """

    start: float
    end: float
    place: StepPlace
    wait: str
    device: float = 0.0

    @property
    def exposed(self) -> float:
        """Returns the time in which nothing is computed because something has not come."""
        return max(self.end - self.start, self.device) if self.wait else 0.0


@dataclass
class RankTime:
    """One rank's time.

    Attributes:
        slices: ranges of its training thread.
        moments: all of its time, in order, without holes.
        steps: (number, start, end).
    """

    slices: list[Slice] = field(default_factory=list)
    moments: list[Activity] = field(default_factory=list)
    steps: list[tuple[int, float, float]] = field(default_factory=list)

    @property
    def start(self) -> float:
        return self.steps[0][1] if self.steps else self.moments[0].start if self.moments else 0.0

    @property
    def end(self) -> float:
        return self.steps[-1][2] if self.steps else self.moments[-1].end if self.moments else 0.0


@dataclass
class Trace:
    """All ranks' time, and where they met.

    Attributes:
        facts: of the training.
        meetings: collectives, with each rank's range.
    """

    facts: Kwargs
    ranks: dict[int, RankTime]
    meetings: list[tuple[What, dict[int, Slice]]]


def read_events(paths: Sequence[str | Path]) -> Kwargs:
    """Reads a trace that was put together, or parts that were not: files, or the folder they are in."""
    files = [file for path in paths for file in _files(Path(path))]
    if len(files) == 1 and ".rank-" not in files[0].name:
        try:
            found = json.loads(files[0].read_text())
            if "shardkit" not in found["otherData"] or not isinstance(found["traceEvents"], list):
                raise KeyError("shardkit")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DamagedFileError(
                f"{files[0]} is no trace of shardkit's ({type(error).__name__}: {error}); shardkit.trace() and "
                "shardkit run --trace write them"
            ) from error
        events: Kwargs = found
        return events
    parts = sorted((read_part(file) for file in files), key=lambda part: part["rank"])
    return merged(parts)


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    whole = path / "trace.json"
    found = [whole] if whole.exists() else sorted(path.glob("*.rank-*.json"))
    if not found:
        raise DamagedFileError(f"{path} has neither a trace.json nor parts of one (*.rank-N.json)")
    return found


def of_events(trace: Kwargs) -> Trace:
    """Takes what is needed from a file's events."""
    ranks: dict[int, RankTime] = defaultdict(RankTime)
    for event in trace["traceEvents"]:
        if event["ph"] != "X":
            continue
        start, end, args = event["ts"], event["ts"] + event["dur"], event.get("args", {})
        if event["cat"] == "steps":
            ranks[event["pid"]].steps.append((args["step"], start, end))
        elif event["cat"] == "shardkit":
            what = What(args["kind"], args["unit"], tuple(args.get("ranks", ())), args.get("bytes", 0))
            device = (0.0, args["device_us"]) if "device_us" in args else None
            ranks[event["pid"]].slices.append(Slice(what, start, end, event["tid"], device))
    for rank in ranks.values():
        rank.slices.sort(key=lambda s: (s.start, -s.end))
        rank.steps.sort()
        rank.moments = list(_with_gaps(rank, list(_moments([s for s in rank.slices if s.thread == 1]))))
    by_rank = dict(sorted(ranks.items()))
    return Trace(trace["otherData"], by_rank, collectives({r: rank.slices for r, rank in by_rank.items()}))


def _moments(slices: Sequence[Slice]) -> Iterator[Activity]:
    """Yields the innermost range at each time; slices begin in order, outer ones first."""
    stack: list[tuple[Slice, StepPlace]] = []
    at = 0.0
    for following in (*slices, None):
        until = math.inf if following is None else following.start
        while stack:
            s, place = stack[-1]
            end = min(s.end, until)
            if end > at:
                waits = s.what.kind.endswith(".wait") or s.what.kind in WAITING
                kind = s.what.kind.removesuffix(".wait")
                device = 0.0 if s.device is None or not waits else s.device[1]
                yield Activity(at, end, place, f"{kind}({s.what.unit})" if waits else "", device)
                at = end
            if s.end > until:
                break
            stack.pop()
        at = max(at, until)
        if following is not None:
            stack.append((following, _place(following.what, stack[-1][1] if stack else None)))


def _place(what: What, around: StepPlace | None) -> StepPlace:
    if what.kind == "forward" and around is not None and around.phase in ("backward", "recomputation"):
        return StepPlace("recomputation", what.unit)
    if what.kind in COMPUTING and not (what.kind in ("step", "update") and around is not None):
        return StepPlace(what.kind, what.unit)
    return around or StepPlace("", "")


def _with_gaps(rank: RankTime, moments: list[Activity]) -> Iterator[Activity]:
    """Fills the time outside of all ranges."""
    at, before = rank.start, StepPlace("step", "")
    for k, moment in enumerate(moments):
        here = moment.place
        if not here.phase:  # a gather before forward, or the like, belongs to what follows
            here = next((m.place for m in moments[k:] if m.place.phase), before)
        if moment.start > at:
            yield Activity(at, moment.start, _between(before, here), "")
        yield moment if moment.place.phase else moment._replace(place=_between(before, here))
        at, before = max(at, moment.end), here
    if rank.end > at:
        yield Activity(at, rank.end, _between(before, StepPlace("data", "")), "")


def _between(before: StepPlace, after: StepPlace) -> StepPlace:
    if before.phase == "forward" and after.phase in ("backward", "backward.end"):
        return StepPlace("loss", "") if after.phase == "backward" else StepPlace("backward", "")
    if before.phase == after.phase and before.phase in ("forward", "backward"):
        return StepPlace(before.phase, "root")
    if after.phase in ("forward", "data") or (before.phase == "data" and after.phase != "step"):
        return StepPlace("between steps", "")
    return StepPlace(f"before {after.phase}", "") if after.phase else StepPlace("between steps", "")


# ------------------------------------------------------------ steps, data and layers are heard
# By thread, for ranks may be threads of one process. Torch's hooks for all optimizers are registered once and for good:
# they can't be taken away while torch goes through them, as it does when a step ends. While nobody counts steps, a
# function written in C is in their place, which takes any arguments, does nothing and costs no Python call.
_watches: dict[int, tuple[StepWatch, ...]] = {}
_handles: list[RemovableHandle] = []
_silent = functools.partial(sys.audit, "shardkit.step")
_lock = threading.Lock()


def _before(optimizer: Optimizer, *_: object) -> None:
    for watch in _watches.get(threading.get_ident(), ()):
        watch.before(optimizer)


def _after(optimizer: Optimizer, *_: object) -> None:
    for watch in _watches.get(threading.get_ident(), ()):
        watch.after(optimizer)


def _follow() -> None:
    if not _handles:
        _handles.append(register_optimizer_step_pre_hook(_before))
        _handles.append(register_optimizer_step_post_hook(_after))
    for handle, hook in zip(_handles, (_before, _after), strict=True):
        hooks = handle.hooks_dict_ref()
        if hooks is not None and handle.id in hooks:
            hooks[handle.id] = hook if _watches else _silent


class StepWatch:
    """Calls ``ended`` when a step is through: one of the optimizer that stepped first, from outside of others' steps.

    Args:
        ended: called in the thread that made this object, with the number of steps since.
    """

    def __init__(self, ended: Callable[[int], None]) -> None:
        self._ended = ended
        self._thread = threading.get_ident()
        self._inside: list[tuple[Optimizer, Heard]] = []
        self._counted: Optimizer | None = None
        self.count = 0
        with _lock:
            _watches[self._thread] = (*_watches.get(self._thread, ()), self)
            _follow()

    def close(self) -> None:
        self._counted = None
        with _lock:
            left = tuple(watch for watch in _watches.pop(self._thread, ()) if watch is not self)
            if left:
                _watches[self._thread] = left
            _follow()

    def before(self, optimizer: Optimizer) -> None:
        self._leave(optimizer)  # it raised, the last time
        inside = Heard(What("step", type(optimizer).__name__))
        inside.__enter__()
        self._inside.append((optimizer, inside))

    def after(self, optimizer: Optimizer) -> None:
        self._leave(optimizer)
        if self._inside:
            return
        if self._counted is None:
            self._counted = optimizer
        if optimizer is self._counted:
            self.count += 1
            self._ended(self.count)

    def _leave(self, optimizer: Optimizer) -> None:
        if any(other is optimizer for other, _ in self._inside):
            while True:
                last, inside = self._inside.pop()
                leave(inside)
                if last is optimizer:
                    return


_waits = 0  # for batches: how many ask
_patched: list[tuple[Framework, AnyCallable]] = []


def hear_of_data() -> None:
    """Makes a range of the time in which a batch is waited for, from now on."""
    global _waits
    with _lock:
        _waits += 1
        if _waits > 1:
            return
        for name in ("torch.utils.data.dataloader", "torchdata.stateful_dataloader.stateful_dataloader"):
            kind = getattr(sys.modules.get(name), "_BaseDataLoaderIter", None)
            if kind is not None and "__next__" in vars(kind):
                _patched.append((kind, kind.__next__))
                kind.__next__ = _heard(kind.__next__)


def forget_data() -> None:
    """Does the opposite, as often."""
    global _waits
    with _lock:
        _waits -= 1
        while _waits == 0 and _patched:
            kind, original = _patched.pop()
            kind.__next__ = original


def _heard(following: AnyCallable) -> AnyCallable:
    what = What("data", "DataLoader")

    @functools.wraps(following)
    def heard(*args: Tree, **kwargs: Tree) -> Tree:
        with Heard(what):
            return following(*args, **kwargs)

    return heard


_models: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()  # and the thread of its rank
_layer_watches: list[LayerWatch] = []


def note_model(module: nn.Module) -> None:
    """Notes that the calling rank trains it; nothing else says where it is."""
    _models[module] = threading.get_ident()
    for watch in _layer_watches:
        watch.watch(module)


class LayerWatch:
    """Makes ranges of the layers of all models of the calling rank, until it is closed."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._handles: list[RemovableHandle] = []
        self._inside: list[tuple[nn.Module, Heard]] = []
        for module in list(_models):
            self.watch(module)
        _layer_watches.append(self)

    def watch(self, module: nn.Module) -> None:
        if _models[module] == self._thread:
            for name, layer in layers_of(module):
                self._attach(name, layer)

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self in _layer_watches:
            _layer_watches.remove(self)

    def _attach(self, name: str, layer: nn.Module) -> None:
        forward, backward = What("forward", name), What("backward", name)

        def enter(module: nn.Module, args: Args) -> None:
            heard = Heard(forward)
            heard.__enter__()
            self._inside.append((module, heard))

        def end(module: nn.Module, args: Args, kwargs: Kwargs, outputs: Tree) -> None:
            while self._inside:
                last, heard = self._inside.pop()
                leave(heard)
                if last is module:
                    break
            for tensor in tree_leaves(outputs):
                if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                    tensor.register_hook(reached)

        def reached(_: torch.Tensor) -> None:
            with Heard(backward):
                pass  # a moment

        self._handles.append(layer.register_forward_pre_hook(enter))
        self._handles.append(layer.register_forward_hook(end, with_kwargs=True, always_call=True))


def layers_of(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yields the children that have parameters, in place of lists of modules their elements; below only children."""
    children = [(name, m) for name, m in module.named_children() if next(m.parameters(), None) is not None]
    if len(children) == 1 and next(children[0][1].children(), None) is not None:
        yield from layers_of(children[0][1], f"{prefix}{children[0][0]}.")
        return
    for name, child in children:
        if isinstance(child, nn.ModuleList | nn.ModuleDict | nn.Sequential):
            for inner, element in child.named_children():
                if next(element.parameters(), None) is not None:
                    yield f"{prefix}{name}.{inner}", element
        else:
            yield f"{prefix}{name}", child


logger = logging.getLogger("shardkit")
VARIABLE = "SHARDKIT_TRACE"


class Tracer:
    """One rank's share in a trace.

    Args:
        path: the file that rank 0 writes.
        steps: which, counted from the first that ends after this object is made; None: from :meth:`begin` to
            :meth:`end`.
        group: the ranks.

    Attributes:
        is_done: the file is written.
    """

    def __init__(self, path: str | os.PathLike[str], steps: range | None, group: Group) -> None:
        self.path, self.group = Path(path), group
        self.is_done = False
        is_range = isinstance(steps, range) and steps.step == 1 and len(steps) > 0 and steps.start >= 0
        if steps is not None and not is_range:
            raise ConfigurationError(
                f"steps={steps!r}: say which steps are traced as range(10, 12), for the eleventh and the twelfth"
            )
        self._steps = steps
        self._recorder: Recorder | None = None
        self._layers: LayerWatch | None = None
        self._watch = StepWatch(self._step_ended)
        if steps is None or steps.start == 0:
            try:
                self.begin()
            except BaseException:
                self._stop()
                raise

    # ------------------------------------------------------------ a trace's course
    def begin(self) -> None:
        """Records from now on (collective).

        Raises:
            RankMismatchError: ranks trace different steps.
        """
        plan = None if self._steps is None else [self._steps.start, self._steps.stop]
        said = self.group.channel("control").all_gather_bytes(
            json.dumps([plan, self._obstacle()]).encode(), label="which steps are traced"
        )
        plans, (obstacle, *_) = zip(*map(json.loads, said), strict=True)
        if obstacle or any(theirs != plans[0] for theirs in plans):
            self._stop()
        if obstacle:
            raise ConfigurationError(f"rank 0 can't write {self.path}: {obstacle}")
        if any(theirs != plans[0] for theirs in plans):
            each = "; ".join(f"rank {rank}: {theirs}" for rank, theirs in enumerate(plans))
            raise RankMismatchError(
                f"ranks trace different steps ({each}); pass the same steps= on all ranks"
            )
        reading = compare_clocks(self.group)
        self._recorder = Recorder(self.group)
        self._recorder.clock.append(reading)
        self._layers = LayerWatch()
        hear_of_data()
        listen(self._recorder)

    def _obstacle(self) -> str:
        """Tells why rank 0 can't write the file."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self.path.is_dir() or not os.access(self.path.parent, os.W_OK):
                return "it is a folder" if self.path.is_dir() else "its folder can't be written to"
        except OSError as error:
            return str(error)
        return ""

    def end(self) -> None:
        """Records no more; rank 0 writes the file (collective)."""
        recorder = self._stop()
        if recorder is None:
            return
        recorder.clock.append(compare_clocks(self.group))
        sent = zlib.compress(json.dumps(recorder.part()).encode(), 1)
        parts = self.group.gather_object(sent, 0, label="parts of a trace")
        self.is_done = True
        if parts is not None:
            whole = merged([json.loads(zlib.decompress(part)) for part in parts])
            write_at_once(self.path, json.dumps(whole))
            logger.info("%s has a trace of %d ranks: shardkit trace %s", self.path, len(parts), self.path)

    def abandon(self) -> None:
        """Records no more; each rank that has recorded anything writes its own part, for ``shardkit trace`` to put
        together."""
        recorder = self._stop()
        if recorder is not None and recorder.events:
            rank = self.group.ranks[self.group.rank]
            write_at_once(part_path(self.path, rank), json.dumps(recorder.part()))

    def _stop(self) -> Recorder | None:
        recorder, self._recorder = self._recorder, None
        self._watch.close()
        if self._layers is not None:
            self._layers.close()
        if recorder is not None:
            stop_listening(recorder)
            forget_data()
            recorder.ended = now()
        return recorder

    def _step_ended(self, count: int) -> None:
        if self._recorder is not None:
            self._recorder.steps.append((count - 1, now()))
        if self._steps is None:
            return
        if count == self._steps.stop:
            self.end()
        elif count == self._steps.start:
            self.begin()


@contextmanager
def trace(
    path: str | os.PathLike[str],
    steps: range | None = None,
    *,
    group: ProcessGroup = None,
    backend: str | Backend | None = None,
) -> Iterator[Tracer]:
    """Traces what is inside, or some steps of it, on all ranks (collective).

    ::

        with shardkit.trace("trace.json", steps=range(10, 12)):
            for batch in loader:
                ...

    Rank 0 writes one file for all ranks, that https://ui.perfetto.dev and chrome://tracing show and
    ``shardkit trace FILE`` explains: which rank waits for which other, in which unit, and why. A step ends with that of
    the optimizer that steps first. Where an error leaves the block, each rank writes its own part beside.

    Args:
        path: of the file.
        steps: counted from the beginning of the block; None: everything inside.
        group: the ranks; None for all.
        backend: theirs, by name or itself, where it is not that of the job's process group.

    Raises:
        ConfigurationError: ``steps`` is no range of at least one step; rank 0 can't write the file.
        RankMismatchError: ranks trace different steps.
    """
    tracer = Tracer(path, steps, backend_of_job(backend).group(group))
    try:
        yield tracer
    except BaseException:
        tracer.abandon()
        raise
    tracer.end()
    if not tracer.is_done:
        logger.warning(
            "nothing was traced: none of the %s began; a step ends with that of the optimizer that steps first",
            steps,
        )


# ------------------------------------------------------------ by the environment
_of_environment: dict[int, Tracer] = {}  # by thread: ranks may be threads of one process


def training_begins(group: Group) -> None:
    """Begins what ``SHARDKIT_TRACE`` asks for, as the calling rank shards something."""
    asked = os.environ.get(VARIABLE)
    if not asked:
        return
    everybody, me = group.backend.group(None), threading.get_ident()
    known = _of_environment.get(me)
    if known is not None and known.group is everybody:
        return
    steps, folder = read_plan(asked)
    _of_environment[me] = tracer = Tracer(folder / "trace.json", steps, everybody)
    atexit.register(tracer.abandon)  # a training that ends before the last of these steps


def read_plan(text: str, where: str = VARIABLE) -> tuple[range, Path]:
    """Reads ``steps=10:12,dir=/path``, which has both step 10 and step 12, as a range and a folder.

    Args:
        where: it was asked for, as errors name it.
    """
    found = re.fullmatch(r"steps=(\d+):(\d+)(?:,dir=(.+))?", text.strip())
    if found is None or int(found[1]) > int(found[2]):
        raise ConfigurationError(
            f"{where} {text!r}: write steps=FIRST:LAST, as steps=10:12 for the steps 10, 11 and 12 (the first is 0); "
            f"for the variable {VARIABLE} also where to, as steps=10:12,dir=runs/1"
        )
    return range(int(found[1]), int(found[2]) + 1), Path(found[3] or ".")
