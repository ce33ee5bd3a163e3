"""Files that the real fairscale has written: read as data, and by shardkit's classes at another number of ranks."""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardkit import compat
from shardkit.backends.processes import RankPool
from shardkit.checkpoint.files.loading import load
from shardkit.errors import UntrustedFileError
from tests.pools import rank_pool

# Not imported here: one of the processes below must not have it.
installed = importlib.util.find_spec("fairscale") is not None
pytestmark = [pytest.mark.oracle, pytest.mark.skipif(not installed, reason="needs fairscale")]


def plain() -> nn.Sequential:
    """Sizes that no number of ranks divides."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(5, 7), nn.Sequential(nn.Linear(7, 3, bias=False), nn.BatchNorm1d(3)), nn.Linear(3, 1)
    )


def train(model: nn.Module, optimizer: Any, rank: int) -> None:
    torch.manual_seed(rank)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(4, 5)).pow(2).sum().backward()
        optimizer.step()


def sharded(fsdp: Any) -> Any:
    on_cpu = {"compute_device": torch.device("cpu")}
    model = plain()
    model[1] = fsdp(model[1], **on_cpu)
    return fsdp(model, **on_cpu)


# ---------------------------------------------------------------- written by fairscale
def write_with_cuda(rank: int, folder: str) -> None:
    """What wants a CUDA device, or takes a CPU for one."""
    from fairscale.nn import FullyShardedDataParallel
    from fairscale.optim.grad_scaler import ShardedGradScaler

    model = sharded(FullyShardedDataParallel)
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=0.05)
    train(model, optimizer, rank)
    torch.save((model.local_state_dict(), model.local_metadata_dict()), f"{folder}/local{rank}.pt")
    full, state = model.state_dict(), model.gather_full_optim_state_dict(optimizer)
    if rank == 0:
        torch.save({"model": full, "optimizer": state}, f"{folder}/fsdp.pt")
        torch.save(ShardedGradScaler(init_scale=64.0).state_dict(), f"{folder}/scaler.pt")


def write(rank: int, folder: str) -> None:
    from fairscale.nn import FlattenParamsWrapper
    from fairscale.optim import OSS, AdaScale

    model = plain()
    optimizer = OSS(model.parameters(), torch.optim.Adam, lr=0.05)
    train(model, optimizer, 0)
    optimizer.consolidate_state_dict()
    if rank == 0:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, f"{folder}/oss.pt")

    model = plain()
    optimizer = AdaScale(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    train(model, optimizer, rank)
    if rank == 0:
        state = {"optimizer": optimizer.state_dict(), "gain": optimizer.gain()}
        torch.save(state, f"{folder}/adascale.pt")
        torch.save(FlattenParamsWrapper(plain()), f"{folder}/module.pt")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("written")
    rank_pool(2, "fairscale").run(write_with_cuda, str(folder))
    rank_pool(2).run(write, str(folder))
    return folder


def same(first: Any, second: Any) -> bool:
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[k], second[k]) for k in first)
    return torch.equal(torch.as_tensor(first), torch.as_tensor(second))


# ---------------------------------------------------------------- read by shardkit
def read_fsdp(rank: int, folder: str) -> None:
    from shardkit.nn import FullyShardedDataParallel

    saved = load(f"{folder}/fsdp.pt")
    parts = [load(f"{folder}/local{r}.pt") for r in range(2)]
    whole = FullyShardedDataParallel.consolidate_shard_weights([p[0] for p in parts], [p[1] for p in parts])
    assert same(dict(whole), dict(saved["model"]))
    model = sharded(FullyShardedDataParallel)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(model.get_shard_from_optim_state_dict(copy.deepcopy(saved["optimizer"])))
    assert same(dict(model.state_dict()), dict(saved["model"]))
    again = model.gather_full_optim_state_dict(optimizer)
    if rank == 0:
        assert same(again["state"], saved["optimizer"]["state"])
        moved = saved["optimizer"]["state"][0]["exp_avg"]
        assert moved.abs().sum() > 0


def read_oss(rank: int, folder: str) -> None:
    from shardkit.optim import OSS

    saved = load(f"{folder}/oss.pt")
    model = plain()
    optimizer = OSS(model.parameters(), torch.optim.Adam, lr=0.5)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    assert same(optimizer.state_dict(all_ranks=True)["state"], saved["optimizer"]["state"])


def read_adascale(rank: int, folder: str) -> None:
    from shardkit.optim import AdaScale

    saved = load(f"{folder}/adascale.pt")
    model = plain()
    optimizer: Any = AdaScale(torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9))
    optimizer.load_state_dict(saved["optimizer"])
    optimizer.set_scale(2.0, update_estimate=False)  # the writer's
    assert optimizer.gain() == saved["gain"] != 1.0


def read_scaler(rank: int, folder: str) -> None:
    from shardkit.optim.grad_scaler import ShardedGradScaler

    scaler = ShardedGradScaler(init_scale=2.0)
    scaler.load_state_dict(load(f"{folder}/scaler.pt"))
    assert scaler.get_scale() == 64.0


@pytest.mark.parametrize("read", [read_fsdp, read_oss, read_adascale, read_scaler])
def test_read_at_another_number_of_ranks(read: Any, written: Path) -> None:
    rank_pool(3).run(read, str(written))


# ---------------------------------------------------------------- pickled modules
def read_module(rank: int, path: str) -> None:
    import shardkit.nn

    with compat.installed():
        with pytest.raises(UntrustedFileError, match=r"module\.pt.*fairscale\.nn\..*trust_pickle=True"):
            load(path)
        module = load(path, trust_pickle=True)
    assert type(module) is shardkit.nn.FlattenParamsWrapper
    assert same(dict(module.state_dict()), dict(plain().state_dict()))


def test_a_pickled_module_needs_trust_and_is_shardkits(fresh: RankPool, written: Path) -> None:
    fresh.run(read_module, str(written / "module.pt"))
