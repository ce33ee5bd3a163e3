"""What a trace tells, for people and as data."""

from __future__ import annotations

from collections.abc import Sequence

from ...tables import counted, in_bytes, in_time, plain_table
from ...tracing.timeline import Place
from ...types import StateDict
from .advice import advice
from .analysis import Analysis, Late

_UNITS = ("unit", "bytes", "forward", "backward", "again", "gather waits", "reduce waits", "late ranks'")
_RANKS = ("rank", "works", "waits", "of that for late ranks", "works %")
_LATE = ("rank", "in", "longer by", "times", "waited for in", "at most")
Table = tuple[str, Sequence[str], Sequence[Sequence[str]], Sequence[int]]


def tables(found: Analysis) -> list[Table]:
    """Title, head, rows and the numbers of columns that are numbers, of each."""
    units = [
        (
            name, in_bytes(u.nbytes) if u.nbytes else "",
            *map(_if_any, (u.forward, u.backward, u.recomputation, u.exposed.get("all_gather", 0.0))),
            _if_any(sum(t for kind, t in u.exposed.items() if kind != "all_gather")), _if_any(sum(u.late.values())),
        )
        for name, u in found.units.items()
    ]  # fmt: skip
    units += [
        (name, "", "", "", "", "", in_time(time), _if_any(found.others_late.get(name, 0.0)))
        for name, time in found.others.items()
    ]
    ranks = [
        (
            str(rank), in_time(busy), in_time(found.exposed_us[rank]), in_time(found.waiting_us[rank]),
            f"{100 * busy / max(1e-9, busy + found.exposed_us[rank]):.0f} %",
        )
        for rank, busy in found.busy_us.items()
    ]  # fmt: skip
    late = [
        (
            str(entry.cause.rank), str(Place(entry.cause.phase, entry.cause.unit)), in_time(entry.total_us),
            str(entry.times), entry.collective, in_time(entry.worst_us),
        )
        for entry in _worth(found)
    ]  # fmt: skip
    return [
        ("A step of each unit: work, and what is waited for (mean of ranks and steps)", _UNITS, units, range(1, 8)),
        ("A step of each rank", _RANKS, ranks, range(1, 5)),
        ("Who is late", _LATE, late, (2, 3, 5)),
    ]  # fmt: skip


def _if_any(us: float) -> str:
    return in_time(us) if us >= 0.5 else ""


def _worth(found: Analysis) -> list[Late]:
    return [entry for entry in found.late if entry.total_us > 0.005 * found.step_us * max(1, found.steps)][:8]


def title(found: Analysis) -> str:
    """One line."""
    exposed = sum(found.exposed_us.values()) / max(1, len(found.exposed_us))
    share = 100 * exposed / max(1e-9, found.step_us)
    clocks = f"; clocks agree within {in_time(found.clock_error_us)}" if found.clock_error_us else ""
    who = f"{counted(found.steps, 'step')} of {counted(len(found.busy_us), 'rank')} ({found.facts.get('backend')})"
    return (
        f"{who}: {in_time(found.step_us)} a step, of which {in_time(exposed)} ({share:.0f} %) are waits that nothing "
        f"hides{clocks}"
    )


def as_text(found: Analysis) -> str:
    """Everything, in plain characters."""
    blocks = [title(found)]
    for heading, head, rows, right in tables(found):
        blocks.append(
            f"{heading}\n{plain_table(head, rows, right)}" if rows else f"{heading}: nobody" * (head is _LATE)
        )
    lines = [f"{k}. {a.found}:\n   {a.change}" for k, a in enumerate(advice(found), 1)]
    blocks.append("What to change\n" + ("\n".join(lines) or "nothing that this trace gives a reason for"))
    return "\n\n".join(block for block in blocks if block)


def as_data(found: Analysis) -> StateDict:
    """For JSON; times in microseconds, of a step."""
    return {
        "steps": found.steps,
        "ranks": {
            str(rank): {
                "work_us": busy, "exposed_us": found.exposed_us[rank],
                "waiting_for_late_ranks_us": found.waiting_us[rank],
            }
            for rank, busy in found.busy_us.items()
        },
        "step_us": found.step_us,
        "phases_us": found.phases,
        "units": {
            name: {
                "bytes": u.nbytes, "forward_us": u.forward, "backward_us": u.backward,
                "recomputation_us": u.recomputation, "exposed_us": dict(u.exposed), "late_us": dict(u.late),
            }
            for name, u in found.units.items()
        },
        "others_us": found.others,
        "late": [
            {
                "rank": e.cause.rank, "phase": e.cause.phase, "unit": e.cause.unit, "total_us": e.total_us,
                "worst_us": e.worst_us, "times": e.times, "collective": e.collective,
            }
            for e in found.late
        ],
        "advice": [a._asdict() for a in advice(found)],
        "facts": dict(found.facts),
    }  # fmt: skip
