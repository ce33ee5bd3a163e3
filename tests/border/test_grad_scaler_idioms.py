"""``torch.amp.GradScaler`` where an overflow shows on one rank alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shardkit import ShardedGradScaler
from tests.border.strategies import GLOO, STRATEGIES, WORLDS, run, twins

SCALE = 1024.0


def _overflow(rank: int, world_size: int, strategy: str, unscale: bool, options: dict[str, Any]) -> None:
    """The middle one of three steps overflows in one element, which one rank has."""
    t = twins(rank, world_size, strategy, torch.optim.AdamW, lr=0.01, **options)
    scalers = [torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=2) for _ in range(2)]
    for step in range(4):
        t.zero_grad()
        for s in scalers:
            s.scale(torch.ones(()))
        t.backward(step, scalers[0].get_scale())
        if step == 1:
            for model in (t.model, t.plain):
                last = [p for p in model.parameters() if p.grad is not None]
                if last and (model is t.plain or rank == world_size - 1):
                    last[-1].grad.view(-1)[0] = float("inf")
        for scaler, model, optimizer in zip(
            scalers, (t.model, t.plain), (t.optimizer, t.plain_optimizer), strict=True
        ):
            if unscale:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
        assert scalers[0].get_scale() == scalers[1].get_scale()
        t.assert_equal()
    assert scalers[1].get_scale() == SCALE


@pytest.mark.parametrize("world", WORLDS, ids=str)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("unscale", [False, True])
def test_an_overflow_on_one_rank(world: tuple[int, str], strategy: str, unscale: bool) -> None:
    run(world, _overflow, strategy, unscale, {})


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("unscale", [False, True])
def test_an_optimizer_that_skips_by_itself(strategy: str, unscale: bool) -> None:
    """Fused ones get the scale and the flag, and unscale in their kernel."""
    run((2, "gloo"), _overflow, strategy, unscale, {"fused": True})


def _both_scalers(rank: int, world_size: int, strategy: str) -> None:
    """shardkit's own scaler decides as before, once."""
    t = twins(rank, world_size, strategy)
    scaler = ShardedGradScaler(SCALE)
    scaler.scale(torch.ones(()))
    t.backward(0, SCALE)
    if rank == world_size - 1:
        owned = [p for p in t.model.parameters() if p.grad is not None]
        owned[-1].grad.view(-1)[0] = float("nan")
    before = {k: v.clone() for k, v in t.model.state_dict().items()}
    scaler.step(t.optimizer)
    scaler.update()
    assert scaler.get_scale() == SCALE / 2
    for k, v in t.model.state_dict().items():
        assert torch.equal(v, before[k])


@pytest.mark.parametrize("world", GLOO, ids=str)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_sharded_scaler(world: tuple[int, str], strategy: str) -> None:
    run(world, _both_scalers, strategy)
