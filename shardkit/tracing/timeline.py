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
"""

from __future__ import annotations

import json
import math
import os
import platform
import socket
import struct
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeAlias, TypedDict

import torch

from ..backend import Group
from ..errors import DamagedFileError
from ..types import Kwargs
from .ranges import What, now

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


class Recorder:
    """Listens to one rank, and keeps all it hears.

    Attributes:
        events: what, start, end, thread and marks of each range, in the order of their ends.
        steps: number of each step that ended, and when.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self.events: list[tuple[What, int, int, int, tuple[object, object] | None]] = []
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
        self.events.append((what, start, end, threading.get_ident(), marks))

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
        return found  # type: ignore[no-any-return]
    return merged(sorted((read_part(file) for file in files), key=lambda part: part["rank"]))


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
