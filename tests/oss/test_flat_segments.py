"""Flat segments: parameters by owner and back, whoever owns what; gradients and values over simulated ranks."""

from __future__ import annotations

import itertools

import torch
from torch import nn

from shardkit.backend import get_backend
from shardkit.oss.placement import InSegments, OnEveryRank, OwnedParameters, placement_for
from shardkit.oss.segments import FlatSegment
from tests.pools import on_ranks

SHAPES = [(2, 3), (1,), (4,)]
WORLD = 2


def _numbered(start: float) -> list[torch.Tensor]:
    sizes = [torch.Size(shape).numel() for shape in SHAPES]
    numbers = torch.arange(start, start + sum(sizes)).split(sizes)
    return [n.view(shape) for n, shape in zip(numbers, SHAPES, strict=True)]


def _params() -> list[nn.Parameter]:
    return [nn.Parameter(value.clone()) for value in _numbered(1.0)]


@on_ranks((WORLD, "simulated"))
def test_parameters_by_owner_and_back(rank: int) -> None:
    group = get_backend("simulated").group(None)
    for owners in itertools.product(range(WORLD), repeat=len(SHAPES)):
        params = _params()
        segment = FlatSegment(params, owners, group)
        values = _numbered(10.0)
        for got, value in zip(segment.split(segment.pack(values)), values, strict=True):
            assert torch.equal(got, value)
        mine = segment.split_own(segment.take_own(values))
        assert set(mine) == {p for p, owner in zip(params, owners, strict=True) if owner == rank}
        for p, value in zip(params, values, strict=True):
            assert p not in mine or torch.equal(mine[p], value)
        assert torch.equal(segment.join_own(mine), segment.take_own(values))

        # what each owner makes of its own, all have
        segment.own.data += 100.0 * (rank + 1)
        segment.publish(None)
        for p, owner, before in zip(params, owners, _numbered(1.0), strict=True):
            assert torch.equal(p.detach(), before + 100.0 * (owner + 1))


@on_ranks((WORLD, "simulated"))
def test_gradients_are_means_and_the_unused_are_known(rank: int) -> None:
    """Every combination of gradients that the ranks have, twice: without a step between they add up."""
    group = get_backend("simulated").group(None)
    owners = [0, 1, 1]
    patterns = list(itertools.product([False, True], repeat=len(SHAPES)))
    for has in itertools.product(patterns, repeat=WORLD):
        params = _params()
        segment = FlatSegment(params, owners, group)
        total = [torch.zeros(shape) for shape in SHAPES]
        ever, all_here = [False] * len(SHAPES), False
        for there in (has, [[not t for t in mine] for mine in has[:1]] + [has[1]]):
            segment.notice_clearing()  # there was none; what stands for the gradient goes
            for i, (p, value) in enumerate(zip(params, _numbered(1.0), strict=True)):
                p.grad = value * (rank + 1) if there[rank][i] else None
                total[i] += value * sum((r + 1) * there[r][i] for r in range(WORLD)) / WORLD
                ever[i] |= any(there[r][i] for r in range(WORLD))
            segment.reduce_gradients(group, None)
            assert torch.equal(segment.own.grad, segment.take_own(total))
            all_here |= all(there[rank])
            used = segment.used()
            assert (used is None) == all_here
            if used is not None:
                marks = segment.take_own(
                    [torch.full_like(p, float(e)) for p, e in zip(params, ever, strict=True)]
                )
                filled = sum(p.numel() for p, owner in zip(params, owners, strict=True) if owner == rank)
                assert torch.equal(used.used[:filled], marks[:filled] != 0)


class Unknown(torch.optim.Adam):
    """No known element-wise optimizer."""


def test_which_placement_an_optimizer_gets() -> None:
    kind, adam, lbfgs = placement_for, torch.optim.Adam, torch.optim.LBFGS
    assert kind(adam, False) is OwnedParameters
    assert kind(adam, True) is InSegments
    assert kind(Unknown, False) is OwnedParameters
    assert kind(Unknown, True) is OnEveryRank
    assert kind(lbfgs, False) is kind(lbfgs, True) is OnEveryRank
