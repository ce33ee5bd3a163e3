"""SyncBatchNorm under ShardedDDP: it trains on CUDA tensors only, but what that takes is tested on the CPU too."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardkit
from shardkit.backend import get_backend
from tests.beside import SGD, assert_same, batch, mean_square, steps_beside
from tests.fsdp_models import build
from tests.pools import on_ranks, rank_pool


def _net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 4), nn.SyncBatchNorm(4), nn.Linear(4, 2))


def _wrapped(model: nn.Module, group: Any = None) -> tuple[shardkit.ShardedDDP, shardkit.OSS]:
    optimizer = shardkit.OSS(model.parameters(), torch.optim.SGD, lr=0.1, group=group)
    return shardkit.ShardedDDP(model, optimizer, group=group), optimizer


# ------------------------------------------------------------------ on the CPU
def _frozen_statistics() -> nn.Module:
    model = _net()
    model[1].running_mean.fill_(0.3)
    model[1].running_var.fill_(2.0)
    model[1].train = lambda mode=True: model[1]  # stays in eval mode, a usual way to fine-tune
    model[1].training = False
    return model


@on_ranks(2, 3)
def test_training_with_frozen_statistics(rank: int, world_size: int) -> None:
    plain = build(_frozen_statistics)
    wrapped, optimizer = _wrapped(build(_frozen_statistics))
    steps_beside(rank, world_size, wrapped, plain, mean_square, [optimizer, SGD(plain.parameters())])
    assert_same(wrapped, plain)


@on_ranks(2)
def test_evaluates_on_the_cpu_and_torch_refuses_training_there(rank: int) -> str:
    torch.manual_seed(rank)
    model = _net()
    model[1].running_mean.normal_()
    wrapped, _ = _wrapped(model)
    plain = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    plain.load_state_dict(model.state_dict())
    means = get_backend("gloo").group().all_gather_object(model[1].running_mean)
    assert all(torch.equal(m, means[0]) for m in means)  # rank 0's
    torch.testing.assert_close(wrapped.eval()(batch(rank, 0)), plain.eval()(batch(rank, 0)))
    with pytest.raises(ValueError, match="on GPU") as refused:  # torch's own words
        wrapped.train()(batch(rank, 0))
    return str(refused.value)


def _layer(group: Any) -> nn.SyncBatchNorm:
    return _wrapped(_net(), group)[0].module[1]


def _sum_over(layer: nn.SyncBatchNorm, rank: int) -> float:
    """What the layer does with its group in training: torch.distributed's collectives."""
    total = torch.full((1,), 10.0**rank)
    dist.all_reduce(total, group=layer.process_group)
    return total.item()


@on_ranks(3)
def test_layers_get_the_wrappers_group(rank: int) -> None:
    torchs = dist.new_group([1, 2])
    ours = get_backend("gloo").group().new_group([1, 2])
    assert _sum_over(_layer(None), rank) == 111.0
    if rank > 0:
        assert ours is not None
        assert _layer(torchs).process_group is torchs
        for group in (torchs, ours):
            layer = _layer(group)
            assert _sum_over(layer, rank) == 110.0
            own = nn.SyncBatchNorm(4, process_group=dist.group.WORLD)
            _wrapped(nn.Sequential(nn.Linear(6, 4), own), group)
            assert own.process_group is dist.group.WORLD  # chosen by the user
    dist.barrier()


@on_ranks((2, "simulated"))
def test_ranks_without_torch_distributed_refuse_training(rank: int) -> None:
    """torch's layer would become a plain BatchNorm there, and give other numbers without a word."""
    wrapped, _ = _wrapped(_net())
    wrapped.eval()(batch(rank, 0))
    with pytest.raises(shardkit.ConfigurationError, match="SyncBatchNorm '1' trains with a process group"):
        wrapped.train()(batch(rank, 0))


# ------------------------------------------------------------------ on CUDA devices
def _trains(rank: int, world_size: int) -> None:
    model = build(_net)
    truth = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    truth.load_state_dict(copy.deepcopy(model.state_dict()))
    optimizer_of_truth = torch.optim.SGD(truth.parameters(), lr=0.1)
    sizes = [3 + r for r in range(world_size)]  # statistics count rows, not ranks
    wrapped, optimizer = _wrapped(model.to(get_backend("cuda").device()))
    for step in range(3):
        optimizer_of_truth.zero_grad()
        outputs = truth(torch.cat([batch(r, step, n) for r, n in enumerate(sizes)])).split(sizes)
        (sum(o.pow(2).mean() for o in outputs) / world_size).backward()
        optimizer_of_truth.step()
        wrapped.zero_grad()
        wrapped(batch(rank, step, sizes[rank]).to(get_backend("cuda").device())).pow(2).mean().backward()
        optimizer.step()
        assert_same(model, truth, f"rank {rank}, step {step}", 1e-5)


@pytest.mark.cuda
@pytest.mark.parametrize(("backend", "devices"), [("gloo", 1), ("cuda", 2)])
def test_statistics_are_those_of_all_ranks(backend: str, devices: int) -> None:
    """Over gloo the ranks may share a device, over NCCL each has its own."""
    if torch.cuda.device_count() < devices:
        pytest.skip(f"needs {devices} CUDA devices")
    rank_pool(2, backend).run(_trains, 2)
