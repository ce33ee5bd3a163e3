"""The order in which a backward gathers units and reduces their gradients, from what its forward did.

[Note: one order] Gathers and reductions wait for all ranks. If one rank issues a gather before a reduction and another
one after it, each may wait for what the other has not issued: then both wait for ever. What is ready when may differ
between ranks (a parameter that only some of them use, a branch that one rank's backward never reaches). So nothing is
issued because it is ready, but because its turn has come in an order that is made of the calls of forward, which are
the same on all ranks. A rank that lacks a gradient when its turn has come says so in what it sends; a rank whose
backward ends early goes on through the order without computing.

Backward passes the calls of forward in the opposite order: it enters a unit where its call ended, and has left it
where its first call began. So on entering the unit at ``position``, backward

1. reduces what it has left: the first ``due[position]`` of ``reductions``;
2. gathers up to ``until[position]``: this unit, those whose activations are computed anew together with its own, and
   ``prefetch`` more.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from .unit import Unit


class End(NamedTuple):
    """A call of a unit ended when so many calls had begun."""

    unit: Unit
    begun: int


class BackwardPlan(NamedTuple):
    """See the note on top.

    Attributes:
        gathers: units in the order in which backward enters them first; a unit's index here is its position.
        reductions: trainable units in the order in which backward leaves them for good.
        due: for each position, how many reductions come before it.
        until: for each position, up to where units are gathered on entering it (exclusive).
        again: for each position, where backward is when the unit's activations are computed anew: at the first unit of
            what is computed together; -1 where they are not.
    """

    gathers: Sequence[Unit]
    reductions: Sequence[Unit]
    due: Sequence[int]
    until: Sequence[int]
    again: Sequence[int]


def plan_backward(
    calls: Sequence[Unit],
    ends: Sequence[End],
    recomputed: Sequence[int],
    units: Iterable[Unit],
    prefetch: int,
) -> BackwardPlan:
    """The plan for a forward.

    Args:
        calls: units in the order in which their calls began.
        ends: the same calls as they ended.
        recomputed: for each call the number of the checkpoint that runs it again in backward, -1 for none.
        units: all units of the root, called or not.
        prefetch: how many units are gathered ahead.
    """
    entered: dict[Unit, int] = {}
    left: dict[Unit, int] = {}
    begun = len(calls)
    time = 0
    for end in reversed(ends):
        while begun > end.begun:
            begun -= 1
            left[calls[begun]] = time = time + 1
        time += 1
        entered.setdefault(end.unit, time)
    for unit in reversed(calls[:begun]):
        left[unit] = time = time + 1

    gathers = list(entered)
    leaving = _times_of_reductions(units, left)
    reductions = sorted(leaving, key=lambda unit: (leaving[unit], left.get(unit, 0)))
    times = [leaving[unit] for unit in reductions]
    due = [bisect_left(times, entered[unit]) for unit in gathers]
    together = _computed_together(gathers, calls, recomputed)
    again = [min(positions, default=-1) for positions in together]
    return BackwardPlan(gathers, reductions, due, _until(together, prefetch), again)


def _times_of_reductions(units: Iterable[Unit], left: dict[Unit, int]) -> dict[Unit, int]:
    """When backward has left all units that use a trainable unit's parameters."""
    users: dict[int, int] = {}  # of each flat parameter, by id
    for unit, time in left.items():
        for flat in (*unit.flats, *unit.borrowed):
            users[id(flat)] = max(time, users.get(id(flat), 0))
    found = {}
    for unit in units:
        time = max((users.get(id(flat), 0) for flat in unit.flats), default=0)
        if time and unit.is_trainable:
            found[unit] = time
    return found


def _computed_together(
    gathers: Sequence[Unit], calls: Sequence[Unit], recomputed: Sequence[int]
) -> list[set[int]]:
    """For each position those whose activations are computed anew with its own; empty where none are."""
    position = {unit: k for k, unit in enumerate(gathers)}
    spans: dict[int, list[int]] = {}
    for index, checkpoint in enumerate(recomputed):
        if checkpoint >= 0:
            spans.setdefault(checkpoint, []).append(index)
    together: list[set[int]] = [set() for _ in gathers]
    for indices in spans.values():
        span = {position[unit] for unit in calls[indices[0] : indices[-1] + 1]}
        for k in span:
            together[k] |= span
    return together


def _until(together: Sequence[set[int]], prefetch: int) -> list[int]:
    until: list[int] = []
    furthest = 0
    for k, positions in enumerate(together):
        furthest = max(furthest, k, *positions)
        until.append(min(furthest + 1 + prefetch, len(together)))
    return until
