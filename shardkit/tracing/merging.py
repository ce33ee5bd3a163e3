"""Parts of all ranks as one file in the trace event format, which Perfetto and chrome://tracing read.

A rank is a process there, its threads and its device are tracks. Times are on rank 0's clock, in microseconds from the
first event. What backward computes between two units has no range of its own on a rank: a moment says that backward
goes into a unit, and the unit's range lasts until the next moment.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

from ..types import Kwargs
from .clocks import Reading, on_rank_0
from .ranges import What
from .recording import FORMAT, Part

Json: TypeAlias = Kwargs
_DEVICE, _STEPS = 1000, 1001  # numbers of tracks


class Slice(NamedTuple):
    """A range on rank 0's clock; start and end in microseconds."""

    what: What
    start: float
    end: float
    thread: int
    device: tuple[float, float] | None


def merged(parts: Sequence[Part]) -> Json:
    """One trace of these parts."""
    parts = [_on_one_clock(part, parts[0]["host"]) for part in parts]
    slices = {part["rank"]: _slices(part) for part in parts}
    origin = min((s.start for of_rank in slices.values() for s in of_rank), default=0.0)
    events: list[Json] = []
    for part in parts:
        events += _tracks(part)
        events += _steps(part, origin)
        events += (_shown(part["rank"], s, origin) for s in slices[part["rank"]])
        events += _in_flight(part["rank"], slices[part["rank"]], origin)
        events += _device_slices(part["rank"], slices[part["rank"]], origin)
    events += _flows(slices, origin)
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


def _on_one_clock(part: Part, host: str) -> Part:
    """Processes of one machine have one clock, unless what was measured speaks against it."""
    if part["host"] == host and all(abs(ahead) <= error for _, ahead, error in part["clock"]):
        return {**part, "clock": []}
    return part


def _slices(part: Part) -> list[Slice]:
    readings = [Reading(*reading) for reading in part["clock"]]
    whats = [What(kind, unit, tuple(ranks), nbytes) for kind, unit, ranks, nbytes in part["whats"]]

    def at(time: float) -> float:
        return on_rank_0(int(time), readings) / 1e3

    found = []
    for number, start, end, thread, first, last in part["events"]:
        device = None if first is None or last is None else (at(first), at(last))
        found.append(Slice(whats[number], at(start), at(end), thread, device))
    found.sort(key=lambda s: (s.thread, s.start, -s.end))
    ended = at(part["ended"])
    return [s for thread in part["threads"] for s in _nested([s for s in found if s.thread == thread], ended)]


def _nested(slices: Iterable[Slice], ended: float) -> Iterator[Slice]:
    """Moments of backward become ranges; what begins in a range ends in it."""
    around: list[float] = []  # ends of ranges that are open
    moment: tuple[Slice, list[float]] | None = None  # and what it is inside of
    for s in slices:
        while around and around[-1] <= s.start:
            around.pop()
        end = min([s.end, *around])
        if s.what.kind == "backward" and moment is not None and _is_within(moment[0].what.unit, s.what.unit):
            continue  # backward goes from the outside in: both have the same output
        if moment is not None and (
            s.what.kind in ("backward", "backward.end", "step", "data") or _is_over(moment, s)
        ):
            yield _lasting(moment, s.start)
            moment = None
        if s.what.kind == "backward":
            moment = (s, list(around))
        else:
            yield s._replace(end=end)
            around.append(end)
    if moment is not None:
        yield _lasting(moment, ended)


def _is_within(unit: str, other: str) -> bool:
    return other == "root" or unit.startswith(other + ".")


def _is_over(moment: tuple[Slice, list[float]], s: Slice) -> bool:
    return any(end <= s.start for end in moment[1])


def _lasting(moment: tuple[Slice, list[float]], until: float) -> Slice:
    return moment[0]._replace(end=min([until, *moment[1]]))


# ------------------------------------------------------------ events
def _tracks(part: Part) -> Iterator[Json]:
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


def _steps(part: Part, origin: float) -> Iterator[Json]:
    readings = [Reading(*reading) for reading in part["clock"]]
    start = on_rank_0(part["began"], readings) / 1e3
    for number, ended in part["steps"]:
        end = on_rank_0(ended, readings) / 1e3
        yield {
            "ph": "X", "cat": "steps", "name": f"step {number}", "pid": part["rank"], "tid": _STEPS,
            "ts": round(start - origin, 3), "dur": round(end - start, 3), "args": {"step": number},
        }  # fmt: skip
        start = end


def _shown(rank: int, s: Slice, origin: float) -> Json:
    args: Json = {"kind": s.what.kind, "unit": s.what.unit}
    if s.what.ranks:
        args["ranks"] = list(s.what.ranks)
    if s.what.nbytes:
        args["bytes"] = s.what.nbytes
    if s.device is not None:
        args["device_us"] = round(s.device[1] - s.device[0], 3)
    return {
        "ph": "X", "cat": "shardkit", "name": s.what.name, "pid": rank, "tid": s.thread + 1,
        "ts": round(s.start - origin, 3), "dur": round(s.end - s.start, 3), "args": args,
    }  # fmt: skip


def _device_slices(rank: int, slices: Sequence[Slice], origin: float) -> Iterator[Json]:
    """Ranges nest on the host; their marks on one stream are in the same order."""
    for s in slices:
        if s.device is not None and s.what.kind != "backward":
            yield {
                "ph": "X", "cat": "device", "name": s.what.name, "pid": rank, "tid": _DEVICE,
                "ts": round(s.device[0] - origin, 3), "dur": round(max(0.0, s.device[1] - s.device[0]), 3),
            }  # fmt: skip


def _in_flight(rank: int, slices: Sequence[Slice], origin: float) -> Iterator[Json]:
    """From when a collective was issued to when this rank had waited for it; these overlap."""
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
            yield {**same, "ph": "b", "ts": round(begun.start - origin, 3)}
            yield {**same, "ph": "e", "ts": round(s.end - origin, 3)}


def _flows(slices: dict[int, list[Slice]], origin: float) -> Iterator[Json]:
    """Lines between the same collective on its ranks, from the first that came to the last."""
    for number, (what, arrivals) in enumerate(collectives(slices)):
        in_order = sorted(arrivals.items(), key=lambda item: item[1].start)
        for place, (rank, s) in enumerate(in_order):
            last = place == len(in_order) - 1
            event: Json = {
                "ph": "s" if place == 0 else "f" if last else "t", "cat": "collective", "name": what.name,
                "id": number, "pid": rank, "tid": s.thread + 1, "ts": round(s.start - origin, 3),
            }  # fmt: skip
            if last:
                event["bp"] = "e"
            yield event


def collectives(slices: dict[int, list[Slice]]) -> list[tuple[What, dict[int, Slice]]]:
    """Those that all of their ranks have come to, with each rank's range, in the order in which they were issued."""
    counts: dict[tuple[int, What], int] = defaultdict(int)
    found: dict[tuple[What, int], dict[int, Slice]] = defaultdict(dict)
    for rank, of_rank in slices.items():
        for s in sorted(of_rank, key=lambda s: s.start):
            if s.what.ranks and is_collective(s.what.kind):
                found[s.what, counts[rank, s.what]][rank] = s
                counts[rank, s.what] += 1
    complete = [
        (what, ranks)
        for (what, _), ranks in found.items()
        if len(ranks) == len(what.ranks) and len(ranks) > 1
    ]
    return sorted(complete, key=lambda item: min(s.start for s in item[1].values()))


def is_collective(kind: str) -> bool:
    """Whether ranks meet where such a range begins."""
    return kind in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "summon")
