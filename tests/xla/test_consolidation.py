"""Consolidation while ranks still save, after one was killed in a save, and of files that don't belong together."""

from __future__ import annotations

import copy
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import shardkit
from shardkit.checkpoint.tools import open_checkpoint
from shardkit.errors import ConfigurationError, RankFailedError
from shardkit.fsdp.state import clean
from shardkit.fsdp.state_dict import consolidate
from shardkit.xla import xla_model as xm
from shardkit.xla.fsdp import XlaFullyShardedDataParallel as FSDP
from shardkit.xla.fsdp import consolidate_sharded_model_checkpoints
from tests.backends.environments import environments
from tests.pools import rank_pool, run_once
from tests.xla.models import batch, build

EACH = [p for p in environments("gloo", "xla") if p.values[1] == 2]
SUFFIX = "_rank-*-of-2.pth"


def _model(tied: bool = False) -> Any:
    model = build(tied=tied)
    model.second = FSDP(model.second)
    return FSDP(model)


def _train(model: Any, rank: int, step: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.zero_grad()
    model(batch(rank, step).to(xm.xla_device())).square().mean().backward()
    optimizer.step()
    xm.mark_step()


def _save(model: Any, rank: int, prefix: str) -> None:
    state = {"model": model.state_dict(), "shard_metadata": model.get_shard_metadata()}
    xm.save(state, f"{prefix}_rank-{rank}-of-2.pth", master_only=False)


def _late(rank: int, prefix: str) -> Any:
    """Rank 1's file is there late; until then, the one before it is, and then half of it. Two units share a weight."""
    from shardkit.backends.xla import sleep

    model = _model(tied=True)
    _train(model, rank, 0)
    _save(model, rank, prefix)
    _train(model, rank, 1)
    path = f"{prefix}_rank-1-of-2.pth"
    _save(model, rank, prefix if rank == 0 else f"{prefix}.late")
    if rank == 0:
        start = time.monotonic()
        full, _ = consolidate_sharded_model_checkpoints(prefix, SUFFIX, save_model=False)
        assert time.monotonic() - start > 0.3
    else:
        sleep(0.3)
        whole = Path(f"{prefix}.late_rank-1-of-2.pth").read_bytes()
        Path(path).write_bytes(whole[: len(whole) // 2])
        sleep(0.3)
        os.replace(f"{prefix}.late_rank-1-of-2.pth", path)
    with model.summon_full_params():
        listed = model.named_parameters(remove_duplicate=False)
        found = {clean(n): p.detach().cpu() for n, p in listed}
    return (found, full) if rank == 0 else None


@pytest.mark.parametrize(("backend", "world_size"), EACH)
def test_rank_0_waits_for_the_files_of_the_others(backend: str, world_size: int, tmp_path: Path) -> None:
    found, full = rank_pool(world_size, backend).run(_late, f"{tmp_path}/ckpt")[0]
    assert len(found) == 8
    for name, value in found.items():
        assert torch.equal(full[name], value), name
    build(tied=True).load_state_dict(full)


def _two(rank: int, prefix: str) -> tuple[Any, Any]:
    for name in ("a", "b"):
        model = _model()
        _train(model, rank, 0)
        _save(model, rank, prefix + name)
    core = shardkit.FSDP(build().to(xm.xla_device()))
    local = core.local_state_dict()
    for key, value in local.items():
        local[key] = value.detach().cpu()
    return local, core.local_metadata_dict()


@pytest.mark.parametrize(("backend", "world_size"), EACH)
def test_files_of_two_models_or_jobs_are_refused(backend: str, world_size: int, tmp_path: Path) -> None:
    pool, prefix = rank_pool(world_size, backend), f"{tmp_path}/"
    local = [pool.run(_two, prefix + job) for job in "12"]
    (one, other), metadata = [[state for state, _ in ranks] for ranks in local], [m for _, m in local[0]]
    assert set(consolidate(one, metadata)) == set(build().state_dict())
    with pytest.raises(ConfigurationError, match=r"state dict 0: run id .*state dict 1: run id"):
        consolidate([one[0], other[1]], metadata)
    names = ["1a", "1b", "2a", "2b"]
    values = [consolidate_sharded_model_checkpoints(prefix + n, SUFFIX, save_model=False)[0] for n in names]
    assert all(torch.equal(values[0][k], v[k]) for v in values for k in v)  # by their values, none can tell
    ids = set()
    for name in names:
        facts = [torch.load(f"{prefix}{name}_rank-{rank}-of-2.pth")["shard_metadata"] for rank in range(2)]
        assert facts[0]["run_id"] == facts[1]["run_id"]
        assert [f["backwards"] for f in facts] == [1, 1]
        ids.add(facts[0]["run_id"])
    assert len(ids) == 4
    for other in ("1b", "2a"):
        shutil.copy(f"{prefix}1a_rank-0-of-2.pth", f"{prefix}mixed_rank-0-of-2.pth")
        shutil.copy(f"{prefix}{other}_rank-1-of-2.pth", f"{prefix}mixed_rank-1-of-2.pth")
        with pytest.raises(
            ConfigurationError, match=r"mixed_rank-0-of-2\.pth: run id .*mixed_rank-1-of-2\.pth: run id"
        ):
            consolidate_sharded_model_checkpoints(f"{prefix}mixed", SUFFIX)
        with pytest.raises(ConfigurationError, match="not saved together"):
            open_checkpoint(f"{prefix}mixed{SUFFIX}")
    state = torch.load(f"{prefix}1a_rank-1-of-2.pth")
    for key in ("run_id", "backwards"):
        del state["shard_metadata"][key]
    torch.save(state, f"{prefix}mixed_rank-1-of-2.pth")
    with pytest.raises(ConfigurationError, match=r"mixed_rank-1-of-2\.pth: no run id"):
        consolidate_sharded_model_checkpoints(f"{prefix}mixed", SUFFIX)


def _copied(rank: int, prefix: str) -> None:
    model = _model()
    ours = copy.deepcopy(model)
    for name, saved in (("model", model), ("copy", ours)):
        _train(saved, rank, 0)
        _save(saved, rank, prefix + name)


@pytest.mark.parametrize(("backend", "world_size"), EACH)
def test_files_of_a_model_and_its_copy_are_refused(backend: str, world_size: int, tmp_path: Path) -> None:
    prefix = f"{tmp_path}/"
    rank_pool(world_size, backend).run(_copied, prefix)
    for name in ("model", "copy"):
        consolidate_sharded_model_checkpoints(prefix + name, SUFFIX, save_model=False)
    shutil.copy(f"{prefix}copy_rank-1-of-2.pth", f"{prefix}model_rank-1-of-2.pth")
    with pytest.raises(
        ConfigurationError, match=r"rank-0-of-2\.pth: run id '(.*)' after 1.*: run id '\1-copy\S+' after 1"
    ):
        consolidate_sharded_model_checkpoints(prefix + "model", SUFFIX)


def _killed(rank: int, prefix: str) -> None:
    model = _model()
    _train(model, rank, 0)
    _save(model, rank, prefix)
    _train(model, rank, 1)
    if rank == 1:
        while torch.load(f"{prefix}_rank-0-of-2.pth")["shard_metadata"]["backwards"] < 2:
            time.sleep(0.05)
        os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
    _save(model, rank, prefix)


def test_a_save_that_was_killed_is_not_mixed_with_the_one_before(tmp_path: Path) -> None:
    with pytest.raises(RankFailedError):
        run_once(2, "gloo", _killed, f"{tmp_path}/ckpt")
    with pytest.raises(
        ConfigurationError, match=r"rank-0-of-2\.pth: .* after 2 backwards.*rank-1-of-2\.pth: .* after 1"
    ):
        consolidate_sharded_model_checkpoints(f"{tmp_path}/ckpt", SUFFIX)
