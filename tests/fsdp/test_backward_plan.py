"""The order of a backward, against a walk through the calls of a drawn forward from its end to its beginning."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit.fsdp.engine import BackwardPlan, plan_backward


@dataclass(eq=False)
class FakeUnit:
    """What the plan asks of a unit."""

    name: int
    is_trainable: bool = True
    flats: list[object] = field(default_factory=lambda: [object()])
    borrowed: list[object] = field(default_factory=list)
    small_bytes: int = -1


# A forward: calls of units, and in each the calls that it makes.
UNITS = 5
forwards = st.recursive(
    st.lists(st.tuples(st.integers(0, UNITS - 1), st.just([])), max_size=3),
    lambda inner: st.lists(st.tuples(st.integers(0, UNITS - 1), inner), max_size=3),
    max_leaves=8,
)


class Forward:
    """What is noted in a forward, and its events."""

    def __init__(self, units: list[FakeUnit], calls: Any) -> None:
        self.calls: list[Any] = []
        self.ends: list[Any] = []
        self.events: list[tuple[str, FakeUnit]] = []
        self._run(units, calls)

    def _run(self, units: list[FakeUnit], calls: Any) -> None:
        for index, inner in calls:
            self.calls.append(units[index])
            self.events.append(("begin", units[index]))
            self._run(units, inner)
            self.events.append(("end", units[index]))
            self.ends.append((units[index], len(self.calls)))

    def plan(self, units: list[Any], prefetch: int = 1, recomputed: list[int] | None = None) -> BackwardPlan:
        return plan_backward(self.calls, self.ends, recomputed or [-1] * len(self.calls), units, prefetch)


@settings(max_examples=200)
@given(forwards, st.sets(st.integers(0, UNITS - 1)), st.booleans(), st.integers(0, 2))
def test_any_forward(calls: Any, frozen: set[int], tied: bool, prefetch: int) -> None:
    units = [FakeUnit(k, is_trainable=k not in frozen) for k in range(UNITS)]
    if tied:
        units[1].borrowed = units[0].flats
    forward = Forward(units, calls)
    plan: Any = forward.plan(units, prefetch)

    entered: dict[FakeUnit, int] = {}
    left: dict[FakeUnit, int] = {}
    for time, (what, unit) in enumerate(reversed(forward.events)):
        if what == "end":
            entered.setdefault(unit, time)
        else:
            left[unit] = time
    assert list(plan.gathers) == list(entered)

    for_good = {}
    for unit in units:
        users = [u for u in left if set(u.flats + u.borrowed) & set(unit.flats)]
        if users and unit.is_trainable:
            for_good[unit] = max(left[u] for u in users)
    assert set(plan.reductions) == set(for_good)
    assert len(plan.reductions) == len(for_good)
    times = [for_good[unit] for unit in plan.reductions]
    assert times == sorted(times)
    assert list(plan.due) == [sum(t < entered[unit] for t in times) for unit in plan.gathers]
    count = len(plan.gathers)
    assert list(plan.until) == [min(k + 1 + prefetch, count) for k in range(count)]
    assert list(plan.again) == [-1] * count


@settings(max_examples=100)
@given(forwards, st.data())
def test_what_is_computed_anew_is_gathered_together(calls: Any, data: Any) -> None:
    units = [FakeUnit(k) for k in range(UNITS)]
    forward = Forward(units, calls)
    count = len(forward.calls)
    first = data.draw(st.integers(0, count))
    last = data.draw(st.integers(first, count))
    recomputed = [0 if first <= k < last else -1 for k in range(count)]
    plan: Any = forward.plan(units, 0, recomputed)
    position = {unit: k for k, unit in enumerate(plan.gathers)}
    together = {position[unit] for unit in forward.calls[first:last]}
    assert list(plan.again) == [min(together) if k in together else -1 for k in range(len(plan.gathers))]
    for k, until in enumerate(plan.until):
        assert until > k
        if k in together:
            assert until > max(together)
    assert list(plan.until) == sorted(plan.until)


@pytest.mark.parametrize("prefetch", [0, 3])
def test_no_calls(prefetch: int) -> None:
    assert Forward([], []).plan([FakeUnit(0)], prefetch) == BackwardPlan([], [], [], [], [])
