"""A network with a layer in each part, wrapped as users do, and what holds on all kinds of ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shardkit import FSDP, PrecisionPolicy, ReshardPolicy
from tests.fsdp_models import WIDTH

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "unflattened": {"flatten": False},
    "bf16": {"precision": PrecisionPolicy(compute=torch.bfloat16, buffers=torch.bfloat16)},
    "kept": {"reshard": ReshardPolicy(after_forward=False)},
}


class Net(nn.Module):
    """Two units below the root; a layer of the root's own."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh())
        self.norm = nn.BatchNorm1d(5)
        self.head = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.block(x)))

    def generate(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = torch.cat([self(x), self.forward(x)], 1)
        return x


def wrap(model: Any, **options: Any) -> Any:
    model.block, model.norm = FSDP(model.block, **options), FSDP(model.norm, **options)
    return FSDP(model, **options)
