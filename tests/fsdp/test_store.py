"""Where a flat parameter's values are: the mode is chosen once, and its state changes as ``TRANSITIONS`` says."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from shardkit import FSDP
from shardkit.errors import LifecycleError
from shardkit.fsdp.flat_param import (
    GATHERED,
    GATHERING,
    KEPT,
    LOCKED,
    RELEASED,
    SUMMONED,
    State,
    Store,
    Unused,
)
from shardkit.policy import PrecisionPolicy, ReshardPolicy
from tests.doors import linears, through
from tests.fsdp_models import WIDTH, batch
from tests.pools import on_ranks, rank_pool

HALF = PrecisionPolicy(compute=torch.bfloat16)


@contextlib.contextmanager
def _watched_states(seen: set[tuple[str, str]]) -> Iterator[None]:
    """Collects all transitions."""

    def get(store: Store) -> State:
        return store.__dict__["state"]

    def put(store: Store, state: State) -> None:
        seen.add((store.__dict__.get("state", state).name, state.name))
        store.__dict__["state"] = state

    Store.state = property(get, put)
    try:
        yield
    finally:
        del Store.state


def _units(**options: object) -> FSDP:
    return through("FSDP", linears(WIDTH, 7, 5, 3), "0", "2", **options)  # type: ignore[no-any-return]


def _train(model: FSDP, rank: int, steps: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        with model.no_sync() if step == 1 else contextlib.nullcontext():
            model(batch(step, 4)[rank]).pow(2).mean().backward()
        if step != 1:
            optimizer.step()
            optimizer.zero_grad()


def _transitions(rank: int, world_size: int) -> set[tuple[str, str]]:
    seen: set[tuple[str, str]] = set()
    with _watched_states(seen):
        for options in ({}, {"reshard": ReshardPolicy(after_forward=False)}, {"precision": HALF}):
            _train(_units(**options), rank, 3)
        kept = _units(reshard=ReshardPolicy(after_forward=world_size // 2 or 1))
        _train(kept, rank, 3)
        loss = kept(batch(0, 4)[rank]).pow(2).mean()
        with kept.summon_full_params():
            pass
        loss.backward()
        kept(batch(0, 4)[rank])  # no backward follows
        with torch.no_grad():
            kept(batch(0, 4)[rank])
    return {(a, b) for a, b in seen if a != b}


# What may follow what, as the note in flat_param.py draws it.
TRANSITIONS: dict[State, tuple[State, ...]] = {
    RELEASED: (GATHERING, GATHERED, SUMMONED),
    KEPT: (GATHERING, RELEASED, SUMMONED),
    GATHERING: (GATHERED, RELEASED),  # released where the all-gather failed
    GATHERED: (LOCKED, RELEASED, KEPT),
    LOCKED: (GATHERED, RELEASED),
    SUMMONED: (RELEASED, KEPT),
}


def test_states_follow_the_table() -> None:
    legal = {(before.name, after.name) for before, those in TRANSITIONS.items() for after in those}
    seen = set().union(*rank_pool(4).run(_transitions, 4), *rank_pool(1).run(_transitions, 1))
    assert seen <= legal
    assert legal - seen == {("GATHERING", "RELEASED")}  # where a gathering fails


def _kinds(rank: int) -> list[str]:
    made = [
        FSDP(nn.Linear(2, 2)),
        FSDP(nn.Linear(2, 2), precision=HALF),
        FSDP(nn.Linear(2, 2, device="meta")),
    ]
    return [type(model._state.flats[0].store).__name__ for model in made]


def test_the_mode_is_a_class() -> None:
    assert rank_pool(1).run(_kinds) == [["Whole", "Stored", "Deferred"]]
    assert rank_pool(2).run(_kinds) == [["Stored", "Stored", "Deferred"]] * 2


@on_ranks(2)
def test_what_a_failed_gathering_leaves_is_not_shown(rank: int) -> None:
    model = FSDP(linears(WIDTH, 7, 5, 3))
    xs = batch(0, 2)[rank]
    right = model(xs)
    store = model._state.flats[0].store
    channel = store._over

    class Failing:
        def wait(self) -> None:
            raise RuntimeError("lost")

    class Broken:
        def all_gather_into(self, output: torch.Tensor, *_: object, **__: object) -> Failing:
            output.fill_(7.0)
            return Failing()

    store._over = Broken()  # type: ignore[assignment]
    model._state.unit.release()
    with pytest.raises(RuntimeError, match="lost"):
        model(xs)
    with pytest.raises(LifecycleError, match="not gathered"):
        model.module[0].weight.sum().item()
    store._over = channel
    torch.testing.assert_close(model(xs), right)


# ------------ Which original parameters count as unused: all orders of a few gradients, against sets.
COUNT = 2
HAD = list(itertools.product([False, True], repeat=COUNT))
NEW = [True, False]


def test_parameters_unused_in_any_order() -> None:
    for notes in itertools.product(itertools.product(HAD, NEW), repeat=3):
        unused, used = Unused(COUNT), set()
        unused.clear(None)
        for had, is_new in notes:
            unused.note(had, itertools.repeat(is_new))
            now = {k for k in range(COUNT) if had[k]}
            used = now if is_new else used | now
            assert unused.originals == [k not in used for k in range(COUNT)]
        unused.clear(None)
        assert unused.originals == [True] * COUNT


def test_elements_unused_where_execution_is_lazy() -> None:
    """None: all elements have had a gradient."""
    masks = [None, *(torch.tensor(had) for had in HAD)]
    for notes in itertools.product(itertools.product(masks, NEW), repeat=2):
        unused = Unused(COUNT)
        unused.clear(torch.tensor([False] * COUNT))
        used = torch.tensor([False] * COUNT)
        for mask, is_new in notes:
            now = torch.tensor([True] * COUNT) if mask is None else mask
            unused.note_elements(mask, now.tolist(), is_new)
            used = now if is_new else used | now
            assert (
                unused.originals == (~used).tolist()
            )  # as far as this rank knows; the truth is data, in ``used``
            assert (unused.used is None and bool(used.all())) or torch.equal(unused.used, used)
