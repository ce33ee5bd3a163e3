"""What to change, where a trace gives a reason: a few rules, each with the numbers it follows from."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import NamedTuple

from ...tables import counted, in_bytes, in_time
from ...tracing.timeline import Place
from .analysis import Analysis, Late

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
    """What is worth changing, the most time first."""
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


def _place(late: Late) -> Place:
    return Place(late.cause.phase, late.cause.unit)


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
    """What is waited for though all ranks have come: it takes that long."""
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
            "exposed communication", f"{in_time(own)} a step are waited for {name}, which nothing hides",
            _OTHER_REMEDY, own,
        )  # fmt: skip


def _uneven(found: Analysis) -> Iterator[Advice]:
    """Slower everywhere, by a little in each place."""
    middle = median(found.busy_us.values()) if found.busy_us else 0.0
    for rank, busy in found.busy_us.items():
        known = sum(late.total_us for late in found.late if late.cause.rank == rank) / max(1, found.steps)
        if middle and busy - known > _UNEVEN * middle:
            yield Advice(
                "uneven ranks", f"rank {rank} works {(busy - known) / middle:.2f} times as long as the median rank, "
                "spread over its step",
                "compare the devices and what else runs on their machines (shardkit doctor), and the lengths of "
                "samples: batches of equal numbers of tokens make ranks alike",
                busy - known - middle,
            )  # fmt: skip


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
        )  # fmt: skip


def _loading(found: Analysis) -> Iterator[Advice]:
    time = found.phases.get("data", 0.0)
    if not any(late.cause.phase == "data" for late in found.late):
        yield Advice(
            "data", f"{in_time(time)} a step all ranks wait for their batches",
            "give the DataLoader workers (num_workers), and pin_memory for devices",
            time,
        )  # fmt: skip
