"""XLA replicas save and restore, and others read what they wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardkit
from shardkit import FSDP, OSS, ShardedDDP
from shardkit.backend import get_backend
from tests.beside import assert_same
from tests.pools import rank_pool

pytest.importorskip("torch_xla")
pytestmark = pytest.mark.xla


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


def _goes_on(rank: int, folder: Path, kind: str) -> None:
    """The same after a step of what was saved, and of what was restored."""
    model, optimizer = _built(kind, 0)
    for k in range(2):
        _step(model, optimizer, k)
    shardkit.save(folder / kind, model=model, optimizer=optimizer, step=2, async_=kind == "oss").wait()
    other, its = _built(kind, 1)
    _step(other, its, 7)
    shardkit.restore(folder / kind, model=other, optimizer=its)
    for each, own in ((model, optimizer), (other, its)):
        _step(each, own, 3)
    assert_same(other, model, kind, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["oss", "fsdp"])
def test_replicas_go_on(kind: str, tmp_path: Path) -> None:
    rank_pool(2, "xla").run(_goes_on, tmp_path, kind)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    assert shardkit.restore(tmp_path / kind, model=model, optimizer=optimizer).world_size == 2
    assert optimizer.state[model[0].weight]["step"] == 2
