"""Checkpoints of XLA replicas."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import shardkit
from shardkit import FSDP, OSS, ShardedDDP
from shardkit.backend import get_backend


def _built(kind: str, seed: int) -> tuple[nn.Module, Any]:
    torch.manual_seed(seed)
    device = get_backend("xla").device()
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)).to(device)
    if kind == "oss":
        optimizer: Any = OSS(model.parameters(), torch.optim.Adam, lr=0.1)
        return ShardedDDP(model, optimizer), optimizer
    model = FSDP(model)
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def _step(model: nn.Module, optimizer: Any, number: int) -> None:
    torch.manual_seed(number)
    optimizer.zero_grad()
    model(torch.randn(2, 4).to(get_backend("xla").device())).square().mean().backward()
    optimizer.step()
    get_backend("xla").mark_step()


def program(rank: int, folder: str, kind: str) -> list[list[float]]:
    """Values after a step of what was saved, and of what was restored."""
    model, optimizer = _built(kind, 0)
    for k in range(2):
        _step(model, optimizer, k)
    shardkit.save(f"{folder}/{kind}", model=model, optimizer=optimizer, step=2, async_=kind == "oss").wait()
    other, its = _built(kind, 1)
    _step(other, its, 7)
    shardkit.restore(f"{folder}/{kind}", model=other, optimizer=its)
    for each, own in ((model, optimizer), (other, its)):
        _step(each, own, 3)
    return [[v for p in m.state_dict().values() for v in p.cpu().flatten().tolist()] for m in (model, other)]
