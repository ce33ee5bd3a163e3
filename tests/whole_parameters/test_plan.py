"""Owners and routes: integer arithmetic, tried on drawn cases."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shardkit.layout import ShardLayout
from shardkit.training.whole_parameters.exchange import (
    ALLOWANCE,
    Bundle,
    held_by_ranks,
    numels_of,
    owners_of,
    plan_of,
)

LAYOUTS = st.tuples(st.lists(st.integers(0, 40), min_size=1, max_size=12), st.integers(1, 6))


@given(LAYOUTS, st.data())
def test_all_elements_reach_the_owner_and_come_back(
    drawn: tuple[list[int], int], data: st.DataObject
) -> None:
    numels, world_size = drawn
    cut = ShardLayout(tuple(numels), world_size).pieces()
    pieces = [[p for p in cut if p.item == k] for k in range(len(numels))]
    owners = [data.draw(st.integers(0, world_size - 1)) for _ in numels]
    plans = [plan_of(pieces, owners, rank, world_size) for rank in range(world_size)]
    for here, plan in enumerate(plans):
        for there, other in enumerate(plans):
            sent = plan.away[there]
            assert sent == other.own[here]  # in one order
            size = 2 * sum(p.numel for p in sent) + len(sent)
            assert numels_of(plan.away, 2, 1)[there] == numels_of(other.own, 2, 1)[here] == size
    for number, owner in enumerate(owners):
        arrived = [p.numel for some in plans[owner].own for p in some if p.item == number]
        own = [p.numel for p in pieces[number] if p.rank == owner]
        assert sum(arrived) + sum(own) == numels[number]
    assert {p.total for p in plans} == {sum(plans[0].total for _ in [0])}
    assert sum(sum(numels_of(p.away, 1, 0)) for p in plans) == plans[0].total


@given(
    st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 5)), min_size=1, max_size=30), st.integers(1, 6)
)
def test_no_rank_has_much_more_than_the_mean(drawn: list[tuple[int, int]], world_size: int) -> None:
    items = [
        Bundle(float(cost), tuple(cost if r == place % world_size else 0 for r in range(world_size)))
        for cost, place in drawn
    ]
    owners = owners_of(items, world_size)
    loads = [sum(i.cost for i, o in zip(items, owners, strict=True) if o == r) for r in range(world_size)]
    mean = sum(loads) / world_size
    assert max(loads) <= ALLOWANCE * mean + max(i.cost for i in items)


def test_equal_matrices_stay_where_they_lie() -> None:
    """Four layers on four ranks, each whole on one: nothing would travel."""
    cut = ShardLayout((36,) * 4, 4).pieces()
    items = [Bundle(216.0, held_by_ranks([p], 4)) for p in cut]
    owners = owners_of(items, 4)
    assert owners == [p.rank for p in cut]
    assert plan_of([[p] for p in cut], owners, 0, 4).total == 0
