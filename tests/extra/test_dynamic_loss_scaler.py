"""A loss scale that follows overflows."""

from __future__ import annotations

import pytest
import torch

from shardkit.experimental.optim import DynamicLossScaler


def _parameter(gradient: float) -> tuple[torch.nn.Parameter, torch.optim.Optimizer]:
    p = torch.nn.Parameter(torch.zeros(2))
    p.grad = torch.full((2,), gradient)
    return p, torch.optim.SGD([p], lr=1.0)


def test_gradients_are_unscaled_once() -> None:
    for explicitly in (False, True):
        scaler = DynamicLossScaler(init_scale=8.0)
        p, optimizer = _parameter(16.0)
        if explicitly:
            scaler.unscale_(optimizer)
            assert p.grad is not None
            assert p.grad.tolist() == [2, 2]
        scaler.step(optimizer)
        scaler.update()
        assert p.tolist() == [-2, -2]


def test_overflow_skips_the_step_and_the_scale_falls_and_rises() -> None:
    scaler = DynamicLossScaler(init_scale=8.0, scale_window=2)
    p, optimizer = _parameter(float("nan"))
    assert scaler.step(optimizer) is None
    assert p.tolist() == [0, 0]
    assert scaler.loss_scale == 4
    scales = []
    for _ in range(5):
        scaler.update()
        scales.append(scaler.loss_scale)
    assert scales == [4, 8, 8, 16, 16]
    assert scaler.state_dict() == {"loss_scale": 16}
    scaler.load_state_dict({"loss_scale": 2.0})
    assert scaler.scale([torch.ones(1), torch.ones(1)])[1].item() == 2


def test_bounds() -> None:
    scaler = DynamicLossScaler(init_scale=4.0, threshold=3.0)
    _, optimizer = _parameter(float("inf"))
    scaler.step(optimizer)
    assert scaler.loss_scale == 3
    scaler = DynamicLossScaler(init_scale=4.0, min_loss_scale=2.0)
    with pytest.raises(FloatingPointError, match="min_loss_scale"):
        scaler.step(optimizer)
    assert scaler.loss_scale == 4


def test_wrong_order() -> None:
    scaler = DynamicLossScaler()
    _, optimizer = _parameter(1.0)
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match=r"after unscale_\(\)"):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="update"):
        scaler.step(optimizer)
    with pytest.raises(RuntimeError, match=r"after step\(\)"):
        scaler.unscale_(optimizer)
    scaler.update()
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="closure"):
        scaler.step(optimizer, closure=lambda: 0.0)
