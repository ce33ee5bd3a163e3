"""Models cut into chains: applied one after the other, the modules are the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shardkit.experimental.nn.auto_shard import shard_model


class Residual(nn.Module):
    """Values that skip layers, a parameter of its own, two inputs, and a part that can't be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        self.branching = Branching()
        self.scale = nn.Parameter(torch.rand(4))
        self.last = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, shift: float = 0.5) -> torch.Tensor:
        h = self.first(x) + shift
        h = h + self.inner(h)
        return self.last(self.branching(h) * self.scale).relu()


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x) if x.sum() > 0 else self.down(x)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(6)])
        self.tied = self.layers[0][0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tied(self.layers(x))


@pytest.mark.parametrize("kind", [Residual, Plain])
@pytest.mark.parametrize("count", [1, 2, 3, 6, 50])
def test_the_chain_is_the_model(kind: Any, count: int) -> None:
    torch.manual_seed(0)
    model = kind()
    chain = shard_model(model, count)
    assert len(chain) <= count
    x = torch.randn(3, 6 if kind is Plain else 4)
    value = x
    for module in chain:
        value = module(value)
    torch.testing.assert_close(value, model(x))
    together = {id(p) for module in chain for p in module.parameters()}
    assert together == {id(p) for p in model.parameters()}  # the model's own
    if kind is Residual:
        held = [{id(p) for p in module.parameters()} for module in chain]
        assert sum(map(len, held)) == len(together)
    if kind is Plain and count in (2, 3):
        assert len(chain) == count
        sizes = [sum(p.numel() for p in module.parameters()) for module in chain]
        assert max(sizes) <= 42 * (6 // count + 1)


def test_nothing_is_cut_off_before_the_output() -> None:
    chain = shard_model(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), 2)
    assert all(list(module.parameters()) for module in chain)


def test_wrong_count() -> None:
    with pytest.raises(ValueError, match="shard_count"):
        shard_model(nn.Linear(1, 1), 0)
