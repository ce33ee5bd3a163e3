"""What a trace tells: where time goes, what communication is exposed, and which rank is late where.

[Note: who is late] Of each collective it is known when each rank came to it. The last one lets the others wait. Why it
is late is found by comparing what ranks did since the collective before: time in which they waited themselves doesn't
count, so that what is left is each rank's own work, by phase and unit. Where the late rank took longer than the others'
median is the cause. A rank that is late still because of an earlier cause has nothing new, and is not counted again.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from ...tracing.timeline import Place, Rank, Trace


class Cause(NamedTuple):
    """One rank is later than others because of one place.

    Attributes:
        rank: which.
        phase, unit: what took longer there than elsewhere.
    """

    rank: int
    phase: str
    unit: str


@dataclass
class Late:
    """How late one cause makes a rank.

    Attributes:
        total_us: over all collectives; each delay counts once.
        worst_us: at one of them.
        collective: that one, which others waited in.
        times: at how many.
    """

    cause: Cause
    total_us: float = 0.0
    worst_us: float = 0.0
    collective: str = ""
    times: int = 0


@dataclass
class UnitTime:
    """A unit's time in a step, mean over ranks and steps, in microseconds.

    Attributes:
        exposed: by what was waited for: all_gather, reduce_scatter, ...
        late: of these, time in which another rank had not come yet.
    """

    forward: float = 0.0
    backward: float = 0.0
    recomputation: float = 0.0
    exposed: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    late: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    nbytes: int = 0


@dataclass
class Analysis:
    """All times in microseconds.

    Attributes:
        steps: how many were traced.
        step_us: the mean of a step, on the slowest rank.
        exposed_us: in a step, on each rank: nothing hides it.
        waiting_us: of that, for ranks that came late.
        busy_us: in a step, on each rank: its own work.
        phases: a step's own work by phase, mean over ranks.
        units: by name, in the order of forward.
        late: causes, the largest first.
        others: exposed time of what is no unit's.
        others_late: of that, for ranks that came late.
    """

    facts: Mapping[str, object]
    steps: int
    step_us: float
    exposed_us: dict[int, float]
    waiting_us: dict[int, float]
    busy_us: dict[int, float]
    phases: dict[str, float]
    units: dict[str, UnitTime]
    others: dict[str, float]
    others_late: dict[str, float]
    late: list[Late]

    @property
    def clock_error_us(self) -> float:
        """Times of ranks are that exact beside each other."""
        return max(_clock_errors(self.facts), default=0.0)


def analyse(trace: Trace) -> Analysis:
    """Everything that is told of a trace."""
    steps = max((len(rank.steps) for rank in trace.ranks.values()), default=0)
    count = max(1, steps)
    share = 1.0 / (count * max(1, len(trace.ranks)))
    arrivals = _last_arrivals(trace)
    units = _units(trace)
    phases: dict[str, float] = defaultdict(float)
    others: dict[str, float] = defaultdict(float)
    others_late: dict[str, float] = defaultdict(float)
    busy, exposed, waiting = (dict.fromkeys(trace.ranks, 0.0) for _ in range(3))
    for number, rank in trace.ranks.items():
        for moment in rank.moments:
            length = moment.end - moment.start
            if not moment.wait:
                busy[number] += length / count
                phases[moment.place.phase] += length * share
                unit = units.get(moment.place.unit)
                if unit is not None and moment.place.phase in ("forward", "backward", "recomputation"):
                    setattr(unit, moment.place.phase, getattr(unit, moment.place.phase) + length * share)
                continue
            exposed[number] += moment.exposed / count
            kind, _, name = moment.wait.rstrip(")").partition("(")
            last = arrivals.get(number, {}).get(moment.wait, ([], []))
            late = min(moment.exposed, max(0.0, _met(last, moment.start) - moment.start))
            waiting[number] += late / count
            if name in units:
                units[name].exposed[kind] += moment.exposed * share
                units[name].late[kind] += late * share
            else:
                others[moment.wait] += moment.exposed * share
                others_late[moment.wait] += late * share
    lengths = [rank.end - rank.start for rank in trace.ranks.values()]
    return Analysis(
        trace.facts, steps, max(lengths, default=0.0) / count, exposed, waiting, busy, dict(phases), units,
        dict(others), dict(others_late), _late(trace),
    )  # fmt: skip


def _units(trace: Trace) -> dict[str, UnitTime]:
    units: dict[str, UnitTime] = {}
    for rank in trace.ranks.values():
        for s in rank.slices:
            if s.what.kind == "forward":
                units.setdefault(s.what.unit, UnitTime())
        for s in rank.slices:
            if s.what.nbytes and s.what.kind == "all_gather" and s.what.unit in units:
                units[s.what.unit].nbytes = s.what.nbytes
    return units


def _last_arrivals(trace: Trace) -> dict[int, dict[str, tuple[list[float], list[float]]]]:
    """For each rank and collective: when the rank had come, and when the last one had, of each time."""
    found: dict[int, dict[str, tuple[list[float], list[float]]]] = defaultdict(dict)
    for what, ranks in trace.meetings:
        last = max(s.start for s in ranks.values())
        for number, s in ranks.items():
            mine, lasts = found[number].setdefault(f"{what.kind}({what.unit})", ([], []))
            mine.append(s.start)
            lasts.append(last)
    return found


def _met(arrivals: tuple[list[float], list[float]], waited_from: float) -> float:
    """When the last rank had come to the collective that is waited for."""
    k = bisect.bisect_right(arrivals[0], waited_from) - 1
    return arrivals[1][k] if k >= 0 else 0.0


# ------------------------------------------------------------ who is late
def _late(trace: Trace) -> list[Late]:
    threshold = 200.0 + 2 * max(_clock_errors(trace.facts), default=0.0)
    takes_turns = bool(trace.facts.get("takes_turns"))  # threads of one process: who comes last says nothing
    found: dict[Cause, Late] = {}
    before = {number: rank.start for number, rank in trace.ranks.items()}
    for what, ranks in trace.meetings:
        arrived = {number: s.start for number, s in ranks.items()}
        last = max(arrived, key=lambda number: arrived[number])
        late = arrived[last] - median(at for number, at in arrived.items() if number != last)
        if late > threshold or takes_turns:
            work = {n: _work(trace.ranks[n], before[n], arrived[n]) for n in arrived}
            if takes_turns:
                last = max(work, key=lambda number: _longest_excess(work, number)[1])
                late = _longest_excess(work, last)[1]
            place, longer = _longest_excess(work, last)
            if place is not None and longer > max(threshold, 0.25 * late):
                cause = Cause(last, place.phase, place.unit)
                entry = found.setdefault(cause, Late(cause))
                entry.total_us += min(late, longer)
                entry.times += 1
                if late > entry.worst_us:
                    entry.worst_us, entry.collective = late, f"{what.kind}({what.unit})"
        before.update(arrived)
    return sorted(found.values(), key=lambda entry: -entry.total_us)


def _clock_errors(facts: Mapping[str, object]) -> list[float]:
    errors = facts.get("clock_error_us", {})
    return [float(error) for error in errors.values()] if isinstance(errors, dict) else []


def _work(rank: Rank, start: float, end: float) -> dict[Place, float]:
    """A rank's own work between two times, by place."""
    found: dict[Place, float] = defaultdict(float)
    first = bisect.bisect_left(rank.moments, start, key=lambda moment: moment.end)
    for moment in rank.moments[first:]:
        if moment.start >= end:
            break
        if not moment.wait:
            found[moment.place] += min(moment.end, end) - max(moment.start, start)
    return found


def _longest_excess(work: Mapping[int, Mapping[Place, float]], rank: int) -> tuple[Place | None, float]:
    others = [of_rank for number, of_rank in work.items() if number != rank]
    excess = {
        place: time - median(other.get(place, 0.0) for other in others) for place, time in work[rank].items()
    }
    if not excess:
        return None, 0.0
    place = max(excess, key=lambda p: excess[p])
    return place, excess[place]
