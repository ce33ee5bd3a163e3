"""Models for the tests of torch_xla's interfaces: buffers, frozen and shared weights, odd sizes."""

from __future__ import annotations

import torch
from torch import nn


class Net(nn.Module):
    """Two blocks, of which the second is frozen in part if asked for; odd sizes."""

    def __init__(self, frozen: bool = False, tied: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(5, 13)
        self.norm = nn.BatchNorm1d(13)
        self.second = nn.Sequential(nn.Linear(13, 13), nn.Tanh())
        self.last = nn.Linear(13, 13)
        if tied:
            self.last.weight = self.second[0].weight
        if frozen:
            self.first.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.second(self.norm(torch.relu(self.first(x)))))


def build(seed: int = 0, **options: bool) -> Net:
    torch.manual_seed(seed)
    return Net(**options)


def batch(rank: int, step: int = 0, rows: int = 6) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(rows, 5, generator=generator)
