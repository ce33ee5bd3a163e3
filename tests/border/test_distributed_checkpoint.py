"""``torch.distributed.checkpoint`` with optimizers over shards."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from tests.border.strategies import GLOO, STRATEGIES, run, twins


def _stepped(rank: int, world_size: int, strategy: str) -> Any:
    t = twins(rank, world_size, strategy, torch.optim.AdamW, lr=0.01)
    t.backward()
    t.step()
    return t


def _refused(rank: int, world_size: int, strategy: str, folder: str) -> None:
    t = _stepped(rank, world_size, strategy)
    state = t.optimizer.state_dict()
    copies = [
        state,
        copy.deepcopy(state),
        {"state": {k: v["exp_avg"].cpu() for k, v in state["state"].items()}},
    ]
    for k, saved in enumerate([*copies, get_optimizer_state_dict(t.model, t.optimizer)]):
        with pytest.raises(CheckpointException, match="gather_full_optim_state_dict"):
            dcp.save({"optim": saved}, checkpoint_id=f"{folder}/{k}")
    dcp.save(
        {"optim": {"state": {0: {"exp_avg": torch.zeros_like(next(t.model.parameters()))}}}},
        checkpoint_id=folder,
    )
    with pytest.raises(CheckpointException, match="gather_full_optim_state_dict"):
        dcp.load({"optim": {"state": {0: {"exp_avg": state["state"][0]["exp_avg"]}}}}, checkpoint_id=folder)


@pytest.mark.parametrize("strategy", [s for s in STRATEGIES if s != "sharded_ddp"])
def test_state_of_shards_is_refused_on_all_ranks(strategy: str, tmp_path: Path) -> None:
    run((2, "gloo"), _refused, strategy, str(tmp_path))


def _own_file(rank: int, world_size: int, strategy: str) -> None:
    """A file for each rank holds plain tensors, and goes on where it was."""
    t = _stepped(rank, world_size, strategy)
    file = io.BytesIO()
    torch.save(t.optimizer.state_dict(), file)
    file.seek(0)
    saved = torch.load(file)
    assert {type(v) for s in saved["state"].values() for v in s.values()} <= {torch.Tensor}
    for state in (saved, t.optimizer.state_dict()):
        t.optimizer.load_state_dict(state)
        assert {type(v) for s in t.optimizer.state.values() for v in s.values()} <= {torch.Tensor}
    t.zero_grad()
    t.backward(1)
    t.step()
    t.assert_equal()
    full = t.model.gather_full_optim_state_dict(t.optimizer)
    if rank == 0:
        truth = t.plain_optimizer.state_dict()["state"]
        for k, state in truth.items():
            torch.testing.assert_close(full["state"][k]["exp_avg"], state["exp_avg"])


@pytest.mark.parametrize("world", GLOO, ids=str)
@pytest.mark.parametrize("strategy", ["fsdp", "unflattened"])
def test_a_file_for_each_rank(world: tuple[int, str], strategy: str) -> None:
    run(world, _own_file, strategy)


def _whole(rank: int, world_size: int, folder: str) -> None:
    """An OSS that was consolidated on all ranks has the same state on all ranks."""
    t = _stepped(rank, world_size, "sharded_ddp")
    state = t.optimizer.state_dict(all_ranks=True)
    dcp.save({"optim": state}, checkpoint_id=folder)
    read = {"optim": t.plain_optimizer.state_dict()}
    dcp.load(read, checkpoint_id=folder)
    for k, values in state["state"].items():
        torch.testing.assert_close(read["optim"]["state"][k]["exp_avg"], values["exp_avg"])


def test_a_consolidated_oss(tmp_path: Path) -> None:
    run((2, "gloo"), _whole, str(tmp_path))
