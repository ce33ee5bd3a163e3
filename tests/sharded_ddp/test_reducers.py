"""Gradients on their way to their owners, dense and sparse: every combination of what ranks have, simulated."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shardkit.backend import Group, get_backend
from shardkit.oss.exchange import Reducer, SparseReducer, plan_buckets
from shardkit.policy import ReducePolicy
from shardkit.torch_seams.hooks import BackwardState, GradientHooks
from tests.pools import on_ranks

SHAPES, OWNERS = [(2, 2), (3,), ()], [0, 1, 0]
WORLD = 2
USED = list(itertools.product([False, True], repeat=len(SHAPES)))
Make = Callable[[list[nn.Parameter], Group, BackwardState], Any]


class Training:
    """Parameters whose gradients are what the backward is told, through a reducer's hooks."""

    def __init__(self, params: list[nn.Parameter], make: Make) -> None:
        self.params = params
        self.group = get_backend("simulated").group(None)
        self.state = BackwardState(lambda: self.reducer.finish())
        self.reducer = make(params, self.group, self.state)
        self._hooks = GradientHooks()
        for hook in self.reducer.hooks():
            self._hooks.attach(*hook)

    def backward(self, loss: torch.Tensor) -> None:
        """As where ranks' backwards differ, the outputs' hook begins it on all of them."""
        loss = loss * 1
        loss.register_hook(lambda _: self.state.begin())
        loss.backward()


def _weights(rank: int, step: int) -> list[torch.Tensor]:
    return [torch.full(shape, float(3 * rank + step + i + 1)) for i, shape in enumerate(SHAPES)]


@pytest.mark.parametrize(
    "policy", [ReducePolicy(), ReducePolicy(bucket_numel=0), ReducePolicy(dtype=torch.bfloat16)], ids=str
)
@on_ranks((WORLD, "simulated"))
def test_owners_have_means_of_what_any_rank_used(rank: int, policy: ReducePolicy) -> None:
    """Three backwards: reduced, kept back, and reduced with both added up."""
    for used in itertools.product(USED, repeat=WORLD):
        training = Training(
            [nn.Parameter(torch.zeros(shape)) for shape in SHAPES],
            lambda p, group, state: Reducer(p, OWNERS, group, policy, state, torch.Tensor),
        )
        nothing = torch.zeros((), requires_grad=True)
        total = [torch.zeros(shape) for shape in SHAPES]
        for step in range(3):
            training.state.accumulating = step == 1
            terms = zip(training.params, _weights(rank, step), used[rank], strict=True)
            training.backward(nothing + sum((p * w).sum() for p, w, is_used in terms if is_used))
            for i in range(len(SHAPES)):
                for r in range(WORLD):
                    total[i] = total[i] + used[r][i] * _weights(r, step)[i] / WORLD
            if step == 1:
                continue
            for i, p in enumerate(training.params):
                if OWNERS[i] == rank and any(u[i] for u in used):
                    torch.testing.assert_close(p.grad, total[i], rtol=0.02 if policy.dtype else 0, atol=0)
                else:
                    assert p.grad is None, (used, step, i)


ROWS = [None, [], [0, 2], [2, 2, 4]]  # of an embedding, None: not used


@on_ranks((WORLD, "simulated"))
def test_owners_have_means_of_sparse_rows(rank: int) -> None:
    for rows in itertools.product(ROWS, repeat=WORLD):
        for owner in range(WORLD):
            weight = nn.Parameter(torch.zeros(5, 3))
            training = Training(
                [weight], lambda p, group, state, owner=owner: SparseReducer(p, [owner], group, state)
            )
            nothing, total = torch.zeros((), requires_grad=True), torch.zeros(5, 3)
            for step in range(2):
                loss = nothing * 1.0
                for r, looked_up in enumerate(rows):
                    scale = float(r + step + 1)
                    for row in looked_up or []:
                        total[row] += scale / WORLD
                    if r == rank and looked_up is not None:
                        found = nn.functional.embedding(
                            torch.tensor(looked_up, dtype=torch.int64), weight, sparse=True
                        )
                        loss = loss + scale * found.sum()
                training.backward(loss)
                if owner == rank and any(looked_up is not None for looked_up in rows):
                    assert weight.grad.is_sparse
                    assert torch.equal(weight.grad.to_dense(), total)
                else:
                    assert weight.grad is None


def test_buckets_hold_one_dtype_and_are_sent_as_they_fill() -> None:
    kinds = [torch.float32, torch.bfloat16, torch.float64]
    for dtypes in itertools.product(kinds, repeat=4):
        params = [nn.Parameter(torch.zeros(3, dtype=dtype)) for dtype in dtypes]
        for cap in (None, 0, 3, 6):
            policy = ReducePolicy(bucket_numel=cap, dtype=torch.bfloat16)
            plan = plan_buckets(params, [0, 1, 0, 1], WORLD, policy)
            assert sorted(i for members, *_ in plan for i in members) == [0, 1, 2, 3]
            for members, wire, *_ in plan:
                assert wire is torch.bfloat16
                assert len({dtypes[i] for i in members}) == 1
                assert members == sorted(members)
                assert len(members) == 1 or cap is None or 3 * len(members) <= cap
            assert [m[-1] for m, *_ in plan] == sorted(m[-1] for m, *_ in plan)
