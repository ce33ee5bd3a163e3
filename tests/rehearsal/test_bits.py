"""``rehearse --bits``: where trainings on several numbers of ranks part."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardkit
from shardkit.tools.cli import main
from shardkit.tools.rehearsal import rehearse_bits


def _in_order(rank: int, strategy: str, order: Any) -> None:
    world = dist.get_world_size()
    torch.manual_seed(2)
    model: Any = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    policy = shardkit.ReducePolicy(order=order, microbatches=6 if order else None)
    if strategy == "sharded_ddp":
        optimizer: Any = shardkit.OSS(model.named_parameters(), torch.optim.SGD, lr=0.1)
        model = shardkit.ShardedDDP(model, optimizer, reduce=policy)
    else:
        shardkit.fully_shard(model, reduce=policy, dtensors=strategy == "dtensors")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(3):
        for k in range(rank, 6, world):
            x = torch.randn(4, 5, generator=torch.Generator().manual_seed(6 * step + k))
            model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("strategy", ["rows", "dtensors", "sharded_ddp"])
def test_the_first_bit_that_differs_is_told(strategy: str) -> None:
    """With a fixed order there is none; else the scale of gradients is a rank's, and the first weights part."""
    report = rehearse_bits(lambda rank: _in_order(rank, strategy, "fixed"), (1, 2, 3))
    assert report.is_good, str(report)
    assert str(report) == "the same bits on 1, 2, 3 ranks: losses and parameters of 3 steps"
    assert "no optimizer has made a step" in str(rehearse_bits(lambda rank: None, (1, 2)))
    [two, three] = rehearse_bits(lambda rank: _in_order(rank, strategy, None), (1, 2, 3)).partings
    assert two.startswith("2 ranks and 1 part at step 0, value of 0.weight, element ")
    assert three.startswith("3 ranks and 1 part at step 0, value of 0.weight, element ")


def test_what_is_found_is_one_line_of_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "idle.py"
    script.write_text("print('idle')\n")
    assert main(["rehearse", "--bits", "--json", "--ranks", "1,2", str(script)]) == 1
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert not found["good"]
    assert set(found) == {"good", "partings"}
