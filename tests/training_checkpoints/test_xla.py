"""XLA replicas save and restore, and others read what they wrote."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch_xla")

import torch
from torch import nn

import shardkit
from tests.pools import rank_pool
from tests.training_checkpoints.xla_programs import program

pytestmark = pytest.mark.xla


@pytest.mark.parametrize("kind", ["oss", "fsdp"])
def test_replicas_go_on(kind: str, tmp_path: Path) -> None:
    for went_on, restored in rank_pool(2, "xla").run(program, str(tmp_path), kind):
        assert went_on == restored
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    assert shardkit.restore(tmp_path / kind, model=model, optimizer=optimizer).world_size == 2
    assert optimizer.state[model[0].weight]["step"] == 2
