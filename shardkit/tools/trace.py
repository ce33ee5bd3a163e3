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
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from ..errors import ConfigurationError
from ..tracing.tables import counted, in_bytes, in_time, plain_table
from ..tracing.timeline import Activity, RankTime, StepPlace, Trace
from ..types import StateDict

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass
class Late:
    """Says how late a rank is because of one place.

    Attributes:
        place: took longer there than on other ranks.
        total_us: over all collectives; each delay counts once.
        worst_us: at one of them.
        collective: that one, which others waited in.
        times: at how many.
    """

    rank: int
    place: StepPlace
    total_us: float = 0.0
    worst_us: float = 0.0
    collective: str = ""
    times: int = 0


@dataclass
class UnitTime:
    """A unit's time in a step, mean over ranks and steps, in microseconds.

    Attributes:
        work: by phase: forward, backward, recomputation.
        exposed: by what was waited for: all_gather, reduce_scatter, ...
        late: of these, time in which another rank had not come yet.
    """

    work: dict[str, float] = field(default_factory=partial(defaultdict, float))
    exposed: dict[str, float] = field(default_factory=partial(defaultdict, float))
    late: dict[str, float] = field(default_factory=partial(defaultdict, float))
    nbytes: int = 0


@dataclass
class Analysis:
    """All times in microseconds.

    Attributes:
        steps: how many were traced.
        step_us: the mean of a step, on the slowest rank.
        units: by name, in the order of forward.
        late: causes, the largest first.
        others: waits for what is no unit's.
        exposed_us: in a step, on each rank: nothing hides it.
        waiting_us: of that, for ranks that came late.
        busy_us: in a step, on each rank: its own work.
        phases: a step's own work by phase, mean over ranks.
    """

    facts: Mapping[str, object]
    steps: int
    step_us: float
    units: dict[str, UnitTime]
    late: list[Late]
    others: UnitTime = field(default_factory=UnitTime)
    exposed_us: dict[int, float] = field(default_factory=dict)
    waiting_us: dict[int, float] = field(default_factory=dict)
    busy_us: dict[int, float] = field(default_factory=dict)
    phases: dict[str, float] = field(default_factory=partial(defaultdict, float))


def analyse(trace: Trace) -> Analysis:
    steps = max((len(rank.steps) for rank in trace.ranks.values()), default=0)
    count = max(1, steps)
    share = 1.0 / (count * max(1, len(trace.ranks)))
    longest = max((rank.end - rank.start for rank in trace.ranks.values()), default=0.0)
    found = Analysis(trace.facts, steps, longest / count, _units(trace), _late(trace))
    arrivals = _arrivals(trace)
    for number, rank in trace.ranks.items():
        busy = exposed = waiting = 0.0
        for moment in rank.moments:
            place, length = moment.place, moment.end - moment.start
            if not moment.wait:
                busy += length
                found.phases[place.phase] += length * share
                if place.unit in found.units:
                    found.units[place.unit].work[place.phase] += length * share
                continue
            came = arrivals[number, moment.wait]
            k = bisect.bisect_right(came, moment.start, key=itemgetter(0)) - 1
            last = came[k][1] if k >= 0 else 0.0
            late = min(moment.exposed, max(0.0, last - moment.start))
            exposed += moment.exposed
            waiting += late
            kind, _, name = moment.wait.rstrip(")").partition("(")
            key, whose = (kind, found.units[name]) if name in found.units else (moment.wait, found.others)
            whose.exposed[key] += moment.exposed * share
            whose.late[key] += late * share
        found.busy_us[number], found.exposed_us[number] = busy / count, exposed / count
        found.waiting_us[number] = waiting / count
    return found


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


def _arrivals(trace: Trace) -> dict[tuple[int, str], list[tuple[float, float]]]:
    """Lists for each rank and collective when the rank had come, and when the last one had, of each time."""
    found: dict[tuple[int, str], list[tuple[float, float]]] = defaultdict(list)
    for what, ranks in trace.meetings:
        last = max(s.start for s in ranks.values())
        for number, s in ranks.items():
            found[number, f"{what.kind}({what.unit})"].append((s.start, last))
    return found


# ------------------------------------------------------------ who is late
def _late(trace: Trace) -> list[Late]:
    threshold = 200.0 + 2 * _clock_error_us(trace.facts)
    takes_turns = bool(trace.facts.get("takes_turns"))  # threads of one process: who comes last says nothing
    found: dict[tuple[int, StepPlace], Late] = {}
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
                entry = found.setdefault((last, place), Late(last, place))
                entry.total_us += min(late, longer)
                entry.times += 1
                if late > entry.worst_us:
                    entry.worst_us, entry.collective = late, f"{what.kind}({what.unit})"
        before.update(arrived)
    return sorted(found.values(), key=lambda entry: -entry.total_us)


def _clock_error_us(facts: Mapping[str, object]) -> float:
    """Tells how exact times of ranks are beside each other."""
    errors = facts.get("clock_error_us")
    return max(map(float, errors.values()), default=0.0) if isinstance(errors, dict) else 0.0


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
    """Yields one for each rank and remedy, the largest cause in full."""
    alike: dict[tuple[int, str], list[Late]] = {}
    for late in found.late:
        if 2 * late.times >= found.steps:  # not what happened once
            general = _LATE_REMEDIES.get(late.place.phase, _LATE_ELSEWHERE)
            remedy = _LATE_REMEDIES.get(str(late.place), general)
            alike.setdefault((late.rank, remedy), []).append(late)
    for (rank, remedy), (first, *others) in alike.items():
        us = first.total_us / max(1, found.steps)
        more = [late for late in others if late.total_us > 0.2 * first.total_us][:3]
        yield Advice(
            "late rank",
            f"rank {rank} takes {in_time(us)} a step longer than the others in {first.place}; they wait for it in "
            f"{first.collective}" + "".join(f"; also in {late.place}" for late in more),
            remedy,
            us,
        )


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
        what = f"{in_time(total)} a step are waits for {_KINDS.get(kind, kind)}, which nothing hides; {where}"
        change = _EXPOSED_REMEDIES.get(kind, _OTHER_REMEDY)
        yield Advice(f"exposed {kind}", what, change, total)
    for name, time in found.others.exposed.items():
        own = time - found.others.late[name]
        what = f"{in_time(own)} a step are waited for {name}, which nothing hides"
        yield Advice("exposed communication", what, _OTHER_REMEDY, own)


def _uneven(found: Analysis) -> Iterator[Advice]:
    """Finds ranks that are slower everywhere, by a little in each place."""
    middle = median(found.busy_us.values()) if found.busy_us else 0.0
    for rank, busy in found.busy_us.items():
        known = sum(late.total_us for late in found.late if late.rank == rank) / max(1, found.steps)
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
    if not any(late.place.phase == "data" for late in found.late):
        what = f"{in_time(time)} a step all ranks wait for their batches"
        change = "give the DataLoader workers (num_workers), and pin_memory for devices"
        yield Advice("data", what, change, time)


_OF_UNITS = ("forward", "backward", "recomputation")
_LATE = ("rank", "in", "longer by", "times", "waited for in", "at most")
Table = tuple[str, Sequence[str], Sequence[Sequence[str]], Sequence[int]]


def _tables(found: Analysis) -> Iterator[Table]:
    """Yields title, head, rows and the numbers of columns that are numbers, of each."""
    head = ("unit", "bytes", "forward", "backward", "again", "gather waits", "reduce waits", "late ranks'")
    rows = []
    for name, u in found.units.items():
        gathers = u.exposed.get("all_gather", 0.0)
        own = [u.work.get(phase, 0.0) for phase in _OF_UNITS]
        times = (*own, gathers, sum(u.exposed.values()) - gathers, sum(u.late.values()))
        rows.append((name, in_bytes(u.nbytes) if u.nbytes else "", *map(_if_any, times)))
    for name, time in found.others.exposed.items():
        rows.append((name, "", "", "", "", "", in_time(time), _if_any(found.others.late[name])))
    title = "A step of each unit: work, and what is waited for (mean of ranks and steps)"
    yield title, head, rows, range(1, 8)
    head_of_ranks = ("rank", "works", "waits", "of that for late ranks", "works %")
    ranks = []
    for rank, busy in found.busy_us.items():
        exposed, share = found.exposed_us[rank], busy / max(1e-9, busy + found.exposed_us[rank])
        times_of_rank = map(in_time, (busy, exposed, found.waiting_us[rank]))
        ranks.append((str(rank), *times_of_rank, f"{100 * share:.0f} %"))
    yield "A step of each rank", head_of_ranks, ranks, range(1, 5)
    worth_saying = 0.005 * found.step_us * max(1, found.steps)
    late = [
        (str(e.rank), str(e.place), in_time(e.total_us), str(e.times), e.collective, in_time(e.worst_us))
        for e in [late for late in found.late if late.total_us > worth_saying][:8]
    ]
    yield "Who is late", _LATE, late, (2, 3, 5)


def _if_any(us: float) -> str:
    return in_time(us) if us >= 0.5 else ""


def as_text(found: Analysis) -> str:
    """Says where time goes, who is late, and what to change."""
    exposed = sum(found.exposed_us.values()) / max(1, len(found.exposed_us))
    share, error = 100 * exposed / max(1e-9, found.step_us), _clock_error_us(found.facts)
    clocks = f"; clocks agree within {in_time(error)}" if error else ""
    who = f"{counted(found.steps, 'step')} of {counted(len(found.busy_us), 'rank')} ({found.facts.get('backend')})"
    blocks = [
        f"{who}: {in_time(found.step_us)} a step, of which {in_time(exposed)} ({share:.0f} %) are waits that nothing "
        f"hides{clocks}"
    ]
    for heading, head, rows, right in _tables(found):
        if rows:
            blocks.append(f"{heading}\n{plain_table(head, rows, right)}")
        elif head is _LATE:
            blocks.append(f"{heading}: nobody")
    lines = [f"{k}. {a.found}:\n   {a.change}" for k, a in enumerate(advice(found), 1)]
    blocks.append("What to change\n" + ("\n".join(lines) or "nothing that this trace gives a reason for"))
    return "\n\n".join(blocks)


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
                **{f"{phase}_us": u.work.get(phase, 0.0) for phase in _OF_UNITS},
                "exposed_us": u.exposed,
                "late_us": u.late,
            }
            for name, u in found.units.items()
        },
        "others_us": found.others.exposed,
        "late": [
            {
                "rank": e.rank,
                **e.place._asdict(),
                **{key: getattr(e, key) for key in ("total_us", "worst_us", "times", "collective")},
            }
            for e in found.late
        ],
        "advice": [a._asdict() for a in advice(found)],
        "facts": dict(found.facts),
    }


# ------------------------------------------------------------ a picture of a step
_COLOURS = {
    "forward": "#4e79a7",
    "loss": "#9c755f",
    "backward": "#f28e2b",
    "recomputation": "#b07aa1",
    "end of backward": "#ffbe7d",
    "step": "#59a14f",
    "data": "#edc948",
    "between steps": "#d9d9d9",
    "waits": "#e15759",
}
_SAME = {"update": "step", "backward.end": "end of backward", "clip": "step"}


def new_figure(width: float, height: float) -> Figure:
    """Returns an empty picture, in inches."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigurationError("plots need matplotlib: pip install matplotlib") from error
    return Figure(figsize=(width, height), layout="constrained")


def plot(trace: Trace, path: str | Path, step: int | None = None) -> None:
    """Writes a picture (SVG, PNG or PDF, by the file's name) of one step; a row for each rank, named by unit."""
    numbers = {number for rank in trace.ranks.values() for number, _, _ in rank.steps}
    step = max(numbers, default=None) if step is None else step
    if numbers and step not in numbers:
        raise ConfigurationError(f"there is no step {step} in this trace; it has {sorted(numbers)}")
    times = [(a, b) for rank in trace.ranks.values() for number, a, b in rank.steps if number == step]
    times = times or [(rank.start, rank.end) for rank in trace.ranks.values()]
    start, end = min(a for a, _ in times), max(b for _, b in times)
    figure = new_figure(13, 1.6 + 0.9 * len(trace.ranks))
    from matplotlib.patches import Patch

    axes = figure.subplots()
    used: dict[str, str] = {}
    for row, rank in enumerate(trace.ranks.values()):
        for (kind, label), group in groupby(rank.moments, key=_shown):  # those that follow each other are one
            alike = list(group)
            left, right = max(alike[0].start, start), min(alike[-1].end, end)
            if right <= left:
                continue
            used[kind] = _COLOURS[kind]
            axes.broken_barh(
                [((left - start) / 1e3, (right - left) / 1e3)],
                (row - 0.4, 0.8),
                color=used[kind],
                hatch="///" if kind == "waits" else None,
                edgecolor="white",
                linewidth=0.3,
            )
            if right - left > 0.02 * (end - start):
                axes.text(
                    ((left + right) / 2 - start) / 1e3,
                    row,
                    label,
                    ha="center",
                    va="center",
                    fontsize=7,
                    clip_on=True,
                    rotation=90 if right - left < 0.08 * (end - start) else 0,
                )
    axes.set(
        yticks=range(len(trace.ranks)),
        yticklabels=[f"rank {number}" for number in trace.ranks],
        xlabel="ms",
        xlim=(0, (end - start) / 1e3),
        ylim=(len(trace.ranks) - 0.5, -0.5),
    )
    handles = [Patch(color=used[kind], label=kind) for kind in _COLOURS if kind in used]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), frameon=False)
    figure.savefig(path)


def _shown(moment: Activity) -> tuple[str, str]:
    if moment.wait:
        return "waits", moment.wait.replace("(", "\n").rstrip(")")
    phase, unit = moment.place
    kind = _SAME.get(phase, phase)
    return kind if kind in _COLOURS else "between steps", unit or phase
