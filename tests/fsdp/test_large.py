"""Models of very many parameters, or of units very deep inside one another."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import shardkit
from tests.pools import on_ranks, rank_pool

DEPTH = 200


class Level(nn.Module):
    """One layer, and what is below."""

    def __init__(self, below: nn.Module) -> None:
        super().__init__()
        self.own = nn.Linear(2, 2)
        self.below = below

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0.01 * self.below(self.own(x).tanh())  # type: ignore[no-any-return]


def _chain(wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = nn.Linear(2, 2)
    for _ in range(DEPTH):
        model = wrap(Level(model))
    return model


def _train(model: nn.Module) -> float:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(torch.ones(2, 2)).sum()
    loss.backward()
    optimizer.step()
    return loss.item()  # type: ignore[no-any-return]


def _deep(rank: int) -> tuple[float, dict[str, torch.Tensor], int]:
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)  # an earlier test's model may have raised it
    try:
        model = _chain(shardkit.FSDP)
        loss = _train(model)
        return loss, model.state_dict(), len(list(model.named_parameters()))
    finally:
        sys.setrecursionlimit(max(limit, sys.getrecursionlimit()))


def test_units_inside_one_another() -> None:
    """Deeper than Python's recursion limit lets the calls of wrappers go; wrapped, trained and saved."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(limit + 10 * DEPTH)  # a plain one this deep needs that
    try:
        plain = _chain(lambda m: m)
        expected = _train(plain)
        values = plain.state_dict()
    finally:
        sys.setrecursionlimit(limit)
    for loss, state, listed in rank_pool(2).run(_deep):
        assert abs(loss - expected) < 1e-4
        assert list(state) == list(values)
        for name, value in values.items():
            torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)
        assert listed == DEPTH  # one flat parameter each; the innermost layer lies in that of its level


# ------------------------------------------------------------------ costs
def _calls_of(run: Callable[[], Any]) -> int:
    """Python and C functions that ``run`` calls."""
    count = 0

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


@on_ranks(2)
def test_wrapping_takes_calls_in_proportion_to_parameters(rank: int) -> None:
    def model(parameters: int) -> nn.Module:
        return nn.ParameterList([nn.Parameter(torch.zeros(2)) for _ in range(parameters)])

    models = [model(n) for n in (10, 1000, 4000)]
    _, few, many = (_calls_of(functools.partial(shardkit.FSDP, m)) for m in models)
    assert many <= 4.4 * few, (few, many)


@on_ranks(2)
def test_state_dicts_take_calls_in_proportion_to_pairs_of_units(rank: int) -> None:
    """Names of entries below are rewritten at each level: a square, but no more."""
    found = []
    for depth in (10, 40):
        model: nn.Module = nn.Linear(2, 2)
        for _ in range(depth):
            model = shardkit.FSDP(Level(model))
        model.state_dict()
        found.append(_calls_of(model.state_dict))
    few, many = found
    assert many <= 16 * few, (few, many)
