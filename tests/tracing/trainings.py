"""Small trainings in which one rank is slow somewhere; run by ranks."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import shardkit
from shardkit.backend import backend_of_job
from tests.doors import through

SLOW = 0.12  # seconds


class Slow(torch.autograd.Function):
    """Takes time in forward or in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward: float, backward: float) -> torch.Tensor:
        ctx.seconds = backward
        time.sleep(forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        time.sleep(ctx.seconds)
        return gradients[0], None, None


class Muon(torch.optim.Muon):
    """Takes long where it is told to; ranks have to have one class."""

    seconds = 0.0

    def step(self, closure: Any = None) -> Any:
        time.sleep(self.seconds)
        return super().step(closure)


WIDTH = 128  # of units that are not so small as to travel with others


class Layer(nn.Module):
    def __init__(self, forward: float, backward: float) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self._slow = forward, backward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(Slow.apply(self.linear(x), *self._slow))


class Model(nn.Module):
    def __init__(self, slow: str) -> None:
        super().__init__()
        self.first = nn.Linear(8, WIDTH)
        self.layers = nn.ModuleList(
            Layer(SLOW * (slow == "forward" and k == 2), SLOW * (slow == "backward" and k == 2))
            for k in range(4)
        )
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


class Data(Dataset[torch.Tensor]):
    def __init__(self, seconds: float, length: int) -> None:
        self._seconds, self._length = seconds, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self._seconds)
        return torch.full((8,), float(index))


def sharded(way: str, slow: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer; "whole": one that updates whole parameters."""
    torch.manual_seed(0)
    model: nn.Module = Model(slow)
    if way == "sharded_ddp":
        owners = shardkit.OSS(model.parameters(), torch.optim.AdamW, lr=1e-3)
        return shardkit.ShardedDDP(model, owners), owners
    units = [f"layers.{k}" for k in range(len(model.layers))]
    model = through({"fsdp": "FSDP", "whole": "fully_shard"}.get(way, way), model, *units)
    if way == "whole":
        Muon.seconds = SLOW * (slow == "step")
        return model, shardkit.WholeParameters(model, Muon, lr=1e-3)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def train(rank: int, way: str, slow: str, steps: int, path: str | None, traced: range | None = None) -> None:
    """With rank 1 slow in "forward" or "backward" of layer 2, in "data" or in the optimizer's "step"."""
    slow = slow if rank == 1 else ""
    model, optimizer = sharded(way, slow)
    loader = DataLoader(Data(SLOW if slow == "data" else 0.0, steps))

    def run() -> None:
        for batch in loader:
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    if path is None:
        run()
    else:
        with shardkit.trace(path, steps=traced):
            run()
    backend_of_job().group(None).barrier()
