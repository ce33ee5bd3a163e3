"""Elements of a flat tensor that had no gradient: after a step they are what a plain process leaves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardkit.optimizer_state.kinds import PutAside, Unused, UnusedRanges, UsedMask
from shardkit.reduction.shard_gradients import StandingGradient

# Rprop's first step makes state from its options; a later one would go on from zero.
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1},
    "Adagrad": {"lr": 0.1, "initial_accumulator_value": 0.1},
    "RMSprop": {"lr": 0.1, "centered": True, "momentum": 0.5},
    "Rprop": {"lr": 0.1},
}


@pytest.mark.parametrize("how", ["ranges", "mask"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_elements_without_gradient_stay(name: str, how: str) -> None:
    """Two parameters in one flat tensor [7]; the second, [3], has gradients in the steps 1 and 3 of four only."""
    torch.manual_seed(0)
    flat = torch.nn.Parameter(torch.randn(7))
    plain = [torch.nn.Parameter(part.clone()) for part in flat.detach().split([4, 3])]
    kind = getattr(torch.optim, name)
    shared, alone = kind([flat], **OPTIMIZERS[name]), kind(plain, **OPTIMIZERS[name])
    for step in range(4):
        gradients = torch.randn(7).split([4, 3])
        is_used = step % 2 == 1
        plain[0].grad, plain[1].grad = gradients[0], gradients[1] if is_used else None
        alone.step()
        flat.grad = torch.cat([gradients[0], gradients[1] * is_used])
        unused: Unused = UnusedRanges([(4, 7)]) if how == "ranges" else UsedMask(torch.arange(7) < 4)
        aside = None if is_used else PutAside(flat.data, shared.state.get(flat, {}), unused)
        shared.step()
        if aside is not None:
            aside.put_back(flat.data, shared.state[flat])
        assert torch.equal(flat.detach(), torch.cat([p.detach() for p in plain])), step


def test_clearing_is_noticed() -> None:
    param, standing = torch.nn.Parameter(torch.ones(2)), StandingGradient()
    assert not standing.was_touched(param)
    for touch in (
        lambda: param.grad.zero_(),  # type: ignore[union-attr]
        lambda: setattr(param, "grad", None),
        lambda: setattr(param, "grad", torch.zeros(2)),
    ):
        standing.stand(param, torch.zeros(2))
        assert not standing.was_touched(param)
        touch()
        assert standing.was_touched(param)
    standing.forget()
    assert not standing.was_touched(param)
