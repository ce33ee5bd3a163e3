"""A trace read back: what each rank's training thread did at every moment.

[Note: places] Ranges nest. At each moment the innermost one counts, and says what the rank does: it waits, or it works
for a place: a phase and a unit, of the innermost range around that computes (``forward``, ``backward``, ``step``, ...).
Outside of all ranges a phase follows from what is around: what comes after a step and before a forward is ``between
steps``, what comes after a forward and before a backward is ``loss``.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from ..errors import DamagedFileError
from ..types import Kwargs
from .merging import Slice, collectives, merged
from .ranges import What
from .recording import read_part

WAITING = ("all_reduce", "broadcast", "summon")  # collectives that are issued and waited for in one
COMPUTING = ("forward", "backward", "step", "update", "data", "clip", "backward.end", "range")


class Place(NamedTuple):
    """Where a rank is in a step."""

    phase: str
    unit: str

    def __str__(self) -> str:
        named = {"data": "data loading", "backward.end": "end of backward", "clip": "clipping"}
        phase = named.get(self.phase, self.phase)
        if self.phase == "range":
            return f"{self.unit!r}"
        return phase if not self.unit or self.phase in named else f"{phase} of {self.unit}"


class Moment(NamedTuple):
    """A piece of a rank's time in which it does one thing; in microseconds.

    Attributes:
        wait: of what it waits for, ``all_gather(layers.1)``; "" where it works.
        device: how long the device waited, where it tells.
    """

    start: float
    end: float
    place: Place
    wait: str
    device: float = 0.0

    @property
    def exposed(self) -> float:
        """Time in which nothing is computed because something has not come."""
        return max(self.end - self.start, self.device) if self.wait else 0.0


@dataclass
class Rank:
    """One rank's time.

    Attributes:
        slices: ranges of its training thread.
        moments: all of its time, in order, without holes.
        steps: (number, start, end).
    """

    slices: list[Slice] = field(default_factory=list)
    moments: list[Moment] = field(default_factory=list)
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
    ranks: dict[int, Rank]
    meetings: list[tuple[What, dict[int, Slice]]]


def read_events(paths: Sequence[str | Path]) -> Kwargs:
    """Reads a trace that was put together, or parts that were not: files, or the folder they are in.

    Raises:
        DamagedFileError: a file is no trace of shardkit's.
    """
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
    """What is needed of a file."""
    ranks: dict[int, Rank] = defaultdict(Rank)
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


def _moments(slices: Sequence[Slice]) -> Iterator[Moment]:
    """The innermost range at each time; slices begin in order, outer ones first."""
    stack: list[tuple[Slice, Place]] = []
    at = 0.0

    def until(time: float) -> Iterator[Moment]:
        nonlocal at
        while stack and stack[-1][0].end <= time:
            yield from piece(stack[-1][0].end)
            stack.pop()
        yield from piece(time)

    def piece(end: float) -> Iterator[Moment]:
        nonlocal at
        if stack and end > at:
            s, place = stack[-1]
            waits = s.what.kind.endswith(".wait") or s.what.kind in WAITING
            kind = s.what.kind.removesuffix(".wait")
            device = 0.0 if s.device is None or not waits else s.device[1]
            yield Moment(at, end, place, f"{kind}({s.what.unit})" if waits else "", device)
        at = max(at, end)

    for s in slices:
        yield from until(s.start)
        around = stack[-1][1] if stack else None
        stack.append((s, _place(s.what, around)))
    yield from until(float("inf"))


def _place(what: What, around: Place | None) -> Place:
    if what.kind == "forward" and around is not None and around.phase in ("backward", "recomputation"):
        return Place("recomputation", what.unit)
    if what.kind in COMPUTING and not (what.kind in ("step", "update") and around is not None):
        return Place(what.kind, what.unit)
    return around or Place("", "")


def _with_gaps(rank: Rank, moments: list[Moment]) -> Iterator[Moment]:
    """Fills the time outside of all ranges."""
    at, before = rank.start, Place("step", "")
    for k, moment in enumerate(moments):
        here = moment.place
        if not here.phase:  # a gather before forward, or the like, belongs to what follows
            here = next((m.place for m in moments[k:] if m.place.phase), before)
        if moment.start > at:
            yield Moment(at, moment.start, _between(before, here), "")
        yield moment if moment.place.phase else moment._replace(place=_between(before, here))
        at, before = max(at, moment.end), here
    if rank.end > at:
        yield Moment(at, rank.end, _between(before, Place("data", "")), "")


def _between(before: Place, after: Place) -> Place:
    if before.phase == "forward" and after.phase in ("backward", "backward.end"):
        return Place("loss", "") if after.phase == "backward" else Place("backward", "")
    if before.phase == after.phase and before.phase in ("forward", "backward"):
        return Place(before.phase, "root")
    if after.phase in ("forward", "data") or (before.phase == "data" and after.phase != "step"):
        return Place("between steps", "")
    return Place(f"before {after.phase}", "") if after.phase else Place("between steps", "")
