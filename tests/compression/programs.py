"""What ranks run to train with compression and without it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from shardkit import FSDP, OSS, Compression, PrecisionPolicy, ReducePolicy, ShardedDDP, fully_shard

WIDTH, STEPS = 72, 6
INT8 = Compression()
BOTH: dict[str, Any] = {
    "precision": PrecisionPolicy(compression=INT8),
    "reduce": ReducePolicy(compression=INT8),
}


class Net(nn.Module):
    """Weights of more than a block and biases of less, one that ranks may leave out, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 97), nn.Linear(97, WIDTH)
        self.extra = nn.Linear(WIDTH, WIDTH)
        self.fixed = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: torch.Tensor, with_extra: bool = True) -> torch.Tensor:
        x = self.second(torch.tanh(self.first(x)))
        if with_extra:
            x = x + self.extra(x)
        return self.head(torch.tanh(self.fixed(x)))


def build() -> Net:
    generator = torch.Generator().manual_seed(0)
    model = Net()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) / WIDTH**0.5)
    return model


def wrapped(**options: Any) -> FSDP:
    model = build()
    model.first, model.second = FSDP(model.first, **options), FSDP(model.second, **options)
    return FSDP(model, **options)


def in_place(**options: Any) -> nn.Module:
    model = build()
    fully_shard(model.first, **options)
    fully_shard(model.second, **options)
    return fully_shard(model, **options)


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(8, WIDTH, generator=generator), torch.randint(5, (8,), generator=generator)


def train(
    model: Any, rank: int, *, steps: int = STEPS, accumulate: bool = False, optimizer: Any = None,
    skip: Callable[[int, int], bool] | None = None,
) -> list[float]:  # fmt: skip
    """Losses; ``skip(rank, step)`` says who leaves the extra layer out."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for step in range(steps):
        for part in range(2 if accumulate else 1):
            x, y = batch(rank, 10 * step + part)
            quiet = model.no_sync() if accumulate and part == 0 else contextlib.nullcontext()
            with quiet:
                loss = functional.cross_entropy(
                    model(x, not (skip is not None and skip(rank, step))).float(), y
                )
                loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def full(model: FSDP) -> dict[str, torch.Tensor]:
    return {k: v.clone() for k, v in model.state_dict().items()}


def sharded_ddp(reduce: ReducePolicy | None = None, net: nn.Module | None = None) -> tuple[ShardedDDP, OSS]:
    model = build() if net is None else net
    optimizer = OSS(model.parameters(), torch.optim.SGD, lr=0.05, momentum=0.9)
    return ShardedDDP(model, optimizer, reduce=reduce), optimizer


def near(found: Sequence[float], truth: Sequence[float], by: float) -> None:
    assert max(abs(a - b) for a, b in zip(found, truth, strict=True)) < by, (found, truth)
