"""``shardkit ckpt convert --to xla``: torch_xla reads it, and what torch_xla wrote is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardkit.checkpoint.tools import Conversion, convert, open_checkpoint
from tests.pools import rank_pool

pytest.importorskip("torch_xla")
pytestmark = pytest.mark.xla


def _build() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))


def _both_ways(rank: int, world_size: int, folder: str) -> Any:
    import torch_xla.core.xla_model as xm
    from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel as Theirs

    state = torch.load(f"{folder}/ranks/rank-{rank:08d}-of-{world_size:08d}.pth")
    device = xm.xla_device()
    model = Theirs(_build().to(device))
    assert {k: v.shape for k, v in model.state_dict().items()} == {
        k: v.shape for k, v in state["model"].items()
    }
    metadata = model.get_shard_metadata()
    assert metadata == state["shard_metadata"]
    model.load_state_dict(state["model"])
    for name, value in model.state_dict().items():
        assert torch.equal(value.cpu(), state["model"][name]), name
    nested = Theirs(
        nn.Sequential(Theirs(_build().to(device), flatten_parameters=True), nn.Linear(3, 2)).to(device)
    )
    saved = {"model": nested.state_dict(), "shard_metadata": nested.get_shard_metadata()}
    xm.save(saved, f"{folder}/flat-{rank}.pth", master_only=False)
    return None


def test_both_ways(tmp_path: Path) -> None:
    from torch_xla.distributed.fsdp import consolidate_sharded_model_checkpoints

    full = {k: v + 1 for k, v in _build().state_dict().items()}
    torch.save(full, tmp_path / "full")
    convert(str(tmp_path / "full"), str(tmp_path / "ranks"), Conversion("xla", 2))
    found, _ = consolidate_sharded_model_checkpoints(f"{tmp_path}/ranks/rank", save_model=False)
    assert set(found) == set(full)
    assert all(torch.equal(found[k], full[k]) for k in full)
    rank_pool(2, "xla").run(_both_ways, 2, str(tmp_path))
    expected, _ = consolidate_sharded_model_checkpoints(f"{tmp_path}/flat", save_model=False)
    read = {k: v.read() for k, v in open_checkpoint(f"{tmp_path}/flat*.pth").model.items()}
    assert set(read) == set(expected)
    assert all(torch.equal(read[k], expected[k]) for k in expected)
