"""ShardedDDP of a model some of whose parameters an optimizer beside OSS updates, on all ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shardkit import OSS, ShardedDDP
from tests.beside import assert_same, batch
from tests.pools import on_ranks


class Calls(nn.Module):
    """Computes a loss of what it holds."""

    def __init__(self, inner: nn.Module, loss: Any) -> None:
        super().__init__()
        self.inner, self.loss = inner, loss

    def forward(self, rank: int, step: int) -> torch.Tensor:
        loss: torch.Tensor = self.loss(self.inner, rank, step)
        return loss


@on_ranks(2, 3)
def test_what_no_rank_uses_stays_as_it_is_for_an_optimizer_beside_oss(rank: int, world_size: int) -> None:
    """A gradient of zeros would have decay and momentum move it; some ranks' uses are all ranks' gradient."""

    def make() -> nn.ModuleList:
        torch.manual_seed(4)
        return nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def loss(model: nn.ModuleList, rank: int, step: int) -> torch.Tensor:
        x = model[1](torch.tanh(model[0](batch(rank, step))))
        if step != 1:
            x = model[2](x)
        return (model[3](x) if rank == 0 else x).square().mean() if step else x.square().mean()

    def beside(layers: nn.ModuleList) -> torch.optim.Optimizer:
        return torch.optim.SGD(layers[2:].parameters(), lr=0.1, momentum=0.9, weight_decay=0.5)

    plain, inner = make(), make()
    optimizers = [OSS(inner[:2].parameters(), torch.optim.SGD, lr=0.1), beside(inner)]
    model = ShardedDDP(Calls(inner, loss), optimizers[0])
    truth = [torch.optim.SGD(plain[:2].parameters(), lr=0.1), beside(plain)]
    for step in range(4):
        for optimizer in (*optimizers, *truth):
            optimizer.zero_grad()
        model(rank, step).backward()
        torch.stack([loss(plain, r, step) for r in range(world_size)]).mean().backward()
        for optimizer in (*optimizers, *truth):
            optimizer.step()
        assert_same(inner, plain, f"step {step}")
        for mine, expected in zip(inner[2:].parameters(), plain[2:].parameters(), strict=True):
            assert (mine.grad is None) == (expected.grad is None)
