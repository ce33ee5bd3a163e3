"""Explains a trace: where time goes, what communication is exposed, which rank is late where, and what to change.

[Note: who is late] Of each collective it is known when each rank came to it. The last one lets the others wait. Why it
is late is found by comparing what ranks did since the collective before: time in which they waited themselves doesn't
count, so that what is left is each rank's own work, by phase and unit. Where the late rank took longer than the others'
median is the cause. A rank that is late still because of an earlier cause has nothing new, and is not counted again.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from ...tracing.tables import counted, in_bytes, in_time, plain_table
from ...tracing.timeline import RankTime, StepPlace, Trace
from ...types import StateDict


class Cause(NamedTuple):
    """One rank is later than others because of one place.

    Attributes:
        phase, unit: what took longer there than elsewhere.
    """

    rank: int
    phase: str
    unit: str


@dataclass
class Late:
    """Says how late one cause makes a rank.

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
        trace.facts,
        steps,
        max(lengths, default=0.0) / count,
        exposed,
        waiting,
        busy,
        dict(phases),
        units,
        dict(others),
        dict(others_late),
        _late(trace),
    )


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
    """Lists for each rank and collective when the rank had come, and when the last one had, of each time."""
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


def _work(rank: RankTime, start: float, end: float) -> dict[StepPlace, float]:
    """Returns a rank's own work between two times, by place."""
    found: dict[StepPlace, float] = defaultdict(float)
    first = bisect.bisect_left(rank.moments, start, key=lambda moment: moment.end)
    for moment in rank.moments[first:]:
        if moment.start >= end:
            break
        if not moment.wait:
            found[moment.place] += min(moment.end, end) - max(moment.start, start)
    return found


def _longest_excess(
    work: Mapping[int, Mapping[StepPlace, float]], rank: int
) -> tuple[StepPlace | None, float]:
    others = [of_rank for number, of_rank in work.items() if number != rank]
    excess = {
        place: time - median(other.get(place, 0.0) for other in others) for place, time in work[rank].items()
    }
    if not excess:
        return None, 0.0
    place = max(excess, key=lambda p: excess[p])
    return place, excess[place]


_WORTH = 0.02  # of a step: less is not spoken of
_SMALL = 2**18  # bytes of a unit
_UNEVEN = 1.15


class Advice(NamedTuple):
    """One thing to change.

    Attributes:
        about: the rule, one word or two.
        found: what the trace shows.
        change: what to do about it.
        us: of a step, that it is about.
    """

    about: str
    found: str
    change: str
    us: float


def advice(found: Analysis) -> list[Advice]:
    """Lists what is worth changing, the most time first."""
    given = [*_late_ranks(found), *_exposed(found), *_uneven(found), *_small_units(found), *_loading(found)]
    return sorted((a for a in given if a.us >= _WORTH * found.step_us), key=lambda a: -a.us)


_LATE_REMEDIES = {
    "data": "give its loader more workers (num_workers, prefetch_factor, persistent_workers), or look at what this "
    "rank reads: its disk, its files, longer samples",
    "between steps": "look at what this rank alone does between steps: logging, saving, evaluation, data that is made "
    "by hand; with shardkit.span(name) around it, traces show a part of that",
    "step": "its optimizer takes longer: shards are even, so look at its device and at other programs there",
    "step of OSS": "it owns parameters that take longer: choose partition='balanced' for OSS",
    "step of WholeParameters": "it owns parameters whose updates take longer: owners are balanced by what an update "
    "costs, so tell it with cost= (a function of class and shape); a parameter as large as all others has one owner",
    "update": "its optimizer has more to do: choose partition='balanced' for OSS",
}
_LATE_ELSEWHERE = (
    "look at what differs on this rank: longer samples, another device or clock rate, other programs on its machine, "
    "code that runs on this rank alone"
)


def _late_ranks(found: Analysis) -> Iterator[Advice]:
    """One for each rank and remedy, the largest cause in full."""
    alike: dict[tuple[int, str], list[Late]] = {}
    for late in found.late:
        if 2 * late.times >= found.steps:  # not what happened once
            general = _LATE_REMEDIES.get(late.cause.phase, _LATE_ELSEWHERE)
            remedy = _LATE_REMEDIES.get(str(_place(late)), general)
            alike.setdefault((late.cause.rank, remedy), []).append(late)
    for (rank, remedy), (first, *others) in alike.items():
        us = first.total_us / max(1, found.steps)
        more = [late for late in others if late.total_us > 0.2 * first.total_us][:3]
        yield Advice(
            "late rank",
            f"rank {rank} takes {in_time(us)} a step longer than the others in {_place(first)}; they wait for it in "
            f"{first.collective}" + "".join(f"; also in {_place(late)}" for late in more),
            remedy,
            us,
        )


def _place(late: Late) -> StepPlace:
    return StepPlace(late.cause.phase, late.cause.unit)


_EXPOSED_REMEDIES = {
    "first all_gather": "a step begins with it, so that nothing before could hide it: let the outermost unit hold "
    "little, and wrap its large parts (embeddings, the head) as units of their own",
    "all_gather": "the units before compute for less time than these gathers take: make units larger, gather further "
    "ahead (ReshardPolicy(prefetch=2)), send less (PrecisionPolicy(compute=torch.bfloat16) or compression=), give "
    "larger batches",
    "reduce_scatter": "gradients travel longer than the next unit's backward takes: send less (ReducePolicy(dtype="
    "torch.bfloat16) or compression=), or accumulate gradients over several batches with no_sync()",
    "all_reduce": "gradients travel between replicas: send less (ReducePolicy(dtype=torch.bfloat16)), or shard over "
    "more ranks",
}
_KINDS = {
    "first all_gather": "the first gather",
    "all_gather": "other gathers",
    "reduce_scatter": "gradients",
    "all_reduce": "gradients of replicas",
}
_OTHER_REMEDY = (
    "send less of it, or less often: ReducePolicy's dtype and compression for gradients, broadcast_dtype of OSS for "
    "updated parameters, broadcast_buffers=False where buffers need not be the same"
)


def _exposed(found: Analysis) -> Iterator[Advice]:
    """Finds what is waited for though all ranks have come: it takes that long."""
    first = next(iter(found.units), None)
    by_kind: dict[str, list[tuple[float, str]]] = {}
    for name, unit in found.units.items():
        for kind, time in unit.exposed.items():
            key = f"first {kind}" if name == first and kind == "all_gather" else kind
            by_kind.setdefault(key, []).append((time - unit.late[kind], name))
    for kind, times in by_kind.items():
        total, (most, name) = sum(time for time, _ in times), max(times)
        nbytes = found.units[name].nbytes
        where = f"{in_time(most)} of it {name}'s" + (f" ({in_bytes(nbytes)})" if nbytes else "")
        yield Advice(
            f"exposed {kind}",
            f"{in_time(total)} a step are waits for {_KINDS.get(kind, kind)}, which nothing hides; {where}",
            _EXPOSED_REMEDIES.get(kind, _OTHER_REMEDY),
            total,
        )
    for name, time in found.others.items():
        own = time - found.others_late.get(name, 0.0)
        yield Advice(
            "exposed communication",
            f"{in_time(own)} a step are waited for {name}, which nothing hides",
            _OTHER_REMEDY,
            own,
        )


def _uneven(found: Analysis) -> Iterator[Advice]:
    """Slower everywhere, by a little in each place."""
    middle = median(found.busy_us.values()) if found.busy_us else 0.0
    for rank, busy in found.busy_us.items():
        known = sum(late.total_us for late in found.late if late.cause.rank == rank) / max(1, found.steps)
        if middle and busy - known > _UNEVEN * middle:
            yield Advice(
                "uneven ranks",
                f"rank {rank} works {(busy - known) / middle:.2f} times as long as the median rank, "
                "spread over its step",
                "compare the devices and what else runs on their machines (shardkit doctor), and the lengths of "
                "samples: batches of equal numbers of tokens make ranks alike",
                busy - known - middle,
            )


def _small_units(found: Analysis) -> Iterator[Advice]:
    small = [name for name, unit in found.units.items() if 0 < unit.nbytes < _SMALL]
    time = sum(sum(found.units[n].exposed.values()) - sum(found.units[n].late.values()) for n in small)
    if len(small) > 2 and len(small) > len(found.units) / 2:
        yield Advice(
            "small units",
            f"{len(small)} of {counted(len(found.units), 'unit')} have less than {in_bytes(_SMALL)}, as {small[0]}; "
            f"{in_time(time)} a step are waited for them",
            "put several together into one unit: a collective of so few bytes takes as long as one of many",
            time,
        )


def _loading(found: Analysis) -> Iterator[Advice]:
    time = found.phases.get("data", 0.0)
    if not any(late.cause.phase == "data" for late in found.late):
        yield Advice(
            "data",
            f"{in_time(time)} a step all ranks wait for their batches",
            "give the DataLoader workers (num_workers), and pin_memory for devices",
            time,
        )


_UNITS = ("unit", "bytes", "forward", "backward", "again", "gather waits", "reduce waits", "late ranks'")
_RANKS = ("rank", "works", "waits", "of that for late ranks", "works %")
_LATE = ("rank", "in", "longer by", "times", "waited for in", "at most")
Table = tuple[str, Sequence[str], Sequence[Sequence[str]], Sequence[int]]


def tables(found: Analysis) -> list[Table]:
    """Title, head, rows and the numbers of columns that are numbers, of each."""
    units = [
        (
            name,
            in_bytes(u.nbytes) if u.nbytes else "",
            *map(_if_any, (u.forward, u.backward, u.recomputation, u.exposed.get("all_gather", 0.0))),
            _if_any(sum(t for kind, t in u.exposed.items() if kind != "all_gather")),
            _if_any(sum(u.late.values())),
        )
        for name, u in found.units.items()
    ]
    units += [
        (name, "", "", "", "", "", in_time(time), _if_any(found.others_late.get(name, 0.0)))
        for name, time in found.others.items()
    ]
    ranks = [
        (
            str(rank),
            in_time(busy),
            in_time(found.exposed_us[rank]),
            in_time(found.waiting_us[rank]),
            f"{100 * busy / max(1e-9, busy + found.exposed_us[rank]):.0f} %",
        )
        for rank, busy in found.busy_us.items()
    ]
    worth_saying = 0.005 * found.step_us * max(1, found.steps)
    late = [
        (
            str(entry.cause.rank),
            str(StepPlace(entry.cause.phase, entry.cause.unit)),
            in_time(entry.total_us),
            str(entry.times),
            entry.collective,
            in_time(entry.worst_us),
        )
        for entry in [late for late in found.late if late.total_us > worth_saying][:8]
    ]
    return [
        (
            "A step of each unit: work, and what is waited for (mean of ranks and steps)",
            _UNITS,
            units,
            range(1, 8),
        ),
        ("A step of each rank", _RANKS, ranks, range(1, 5)),
        ("Who is late", _LATE, late, (2, 3, 5)),
    ]


def _if_any(us: float) -> str:
    return in_time(us) if us >= 0.5 else ""


def title(found: Analysis) -> str:
    exposed = sum(found.exposed_us.values()) / max(1, len(found.exposed_us))
    share = 100 * exposed / max(1e-9, found.step_us)
    clocks = f"; clocks agree within {in_time(found.clock_error_us)}" if found.clock_error_us else ""
    who = f"{counted(found.steps, 'step')} of {counted(len(found.busy_us), 'rank')} ({found.facts.get('backend')})"
    return (
        f"{who}: {in_time(found.step_us)} a step, of which {in_time(exposed)} ({share:.0f} %) are waits that nothing "
        f"hides{clocks}"
    )


def as_text(found: Analysis) -> str:
    blocks = [title(found)]
    for heading, head, rows, right in tables(found):
        blocks.append(
            f"{heading}\n{plain_table(head, rows, right)}" if rows else f"{heading}: nobody" * (head is _LATE)
        )
    lines = [f"{k}. {a.found}:\n   {a.change}" for k, a in enumerate(advice(found), 1)]
    blocks.append("What to change\n" + ("\n".join(lines) or "nothing that this trace gives a reason for"))
    return "\n\n".join(block for block in blocks if block)


def as_data(found: Analysis) -> StateDict:
    """Returns what JSON takes; times in microseconds, of a step."""
    return {
        "steps": found.steps,
        "ranks": {
            str(rank): {
                "work_us": busy,
                "exposed_us": found.exposed_us[rank],
                "waiting_for_late_ranks_us": found.waiting_us[rank],
            }
            for rank, busy in found.busy_us.items()
        },
        "step_us": found.step_us,
        "phases_us": found.phases,
        "units": {
            name: {
                "bytes": u.nbytes,
                "forward_us": u.forward,
                "backward_us": u.backward,
                "recomputation_us": u.recomputation,
                "exposed_us": dict(u.exposed),
                "late_us": dict(u.late),
            }
            for name, u in found.units.items()
        },
        "others_us": found.others,
        "late": [
            {
                "rank": e.cause.rank,
                "phase": e.cause.phase,
                "unit": e.cause.unit,
                "total_us": e.total_us,
                "worst_us": e.worst_us,
                "times": e.times,
                "collective": e.collective,
            }
            for e in found.late
        ],
        "advice": [a._asdict() for a in advice(found)],
        "facts": dict(found.facts),
    }
