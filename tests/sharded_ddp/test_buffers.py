"""Buffers under ShardedDDP: what is registered later, and SyncBatchNorm.

SyncBatchNorm trains on CUDA tensors only, but what that takes is tested on the CPU too.
"""

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
from tests.pools import on_ranks, rank_pool, run_once


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


# ------------------------------------------------------------------ registered after wrapping
class _Times(nn.Module):
    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.register_buffer("by", torch.rand(size) + 0.5)
        self.register_buffer("more", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.register_buffer("cache", x.new_ones(len(x), 1), persistent=False)
        return x * self.by * (1.0 if self.more is None else self.more) * self.cache


def _changed(model: nn.Sequential, how: str, seed: int) -> None:
    torch.manual_seed(seed)
    if how == "old spectral_norm":
        nn.utils.spectral_norm(model[0])
    elif how == "spectral_norm":
        nn.utils.parametrizations.spectral_norm(model[0])
    elif how == "a module":
        model[0] = nn.Sequential(model[0], _Times())
    elif how == "a buffer":
        model[1].more = torch.rand(4) + 0.5
    else:  # of another shape
        model[1].by = torch.rand(1) + 0.5


CHANGES = ["old spectral_norm", "spectral_norm", "a module", "a buffer", "another shape"]


@pytest.mark.parametrize("how", CHANGES)
@pytest.mark.parametrize("broadcast", [True, False])
@on_ranks(2, 3, (2, "simulated"))
def test_what_is_registered_later(rank: int, world_size: int, how: str, broadcast: bool) -> None:
    """A forward finds rank 0's: the first one after it was registered, and an evaluation after a step."""
    with_times = lambda: nn.Sequential(nn.Linear(6, 4), _Times(), nn.Linear(4, 2))  # noqa: E731
    plain, model = build(with_times), build(with_times)
    optimizer = shardkit.OSS(model.parameters(), torch.optim.SGD, lr=0.1)
    wrapped = shardkit.ShardedDDP(model, optimizer, broadcast_buffers=broadcast)
    optimizers = [optimizer, SGD(plain.parameters())]
    for step in range(5):
        if step == 2:  # warm
            _changed(plain, how, 0)
            _changed(model, how, rank if broadcast else 0)
        for o in optimizers:
            o.zero_grad()
        wrapped(batch(rank, step)).square().mean().backward()
        plain(torch.cat([batch(r, step) for r in range(world_size)])).square().mean().backward()
        for o in optimizers:
            o.step()
    assert_same(wrapped, plain)
    if broadcast:
        model[1].register_buffer("own", torch.full((2,), float(rank + 1)))
        for step in range(2):  # another batch size is no other buffer
            wrapped(batch(rank, step, 4 + rank))
        assert model[1].own.tolist() == [1.0, 1.0]
    else:
        model[1].by.fill_(rank)
        wrapped(batch(rank, 0)).sum().backward()
        optimizer.step()
        assert set(model[1].by.tolist()) == {rank}


def _registers_alone(rank: int, who: int, how: str) -> str:
    model = build(lambda: nn.Sequential(nn.Linear(6, 4), _Times(), nn.Linear(4, 2)))
    wrapped, optimizer = _wrapped(model)
    for step in range(3):
        if step == 1 and rank == who:
            _changed(model, how, 0)
        try:
            wrapped(batch(rank, step)).square().mean().backward()
            optimizer.step()
        except shardkit.OutOfStepError as error:
            return str(error)
    return ""


@pytest.mark.parametrize(
    ("who", "backend", "how"),
    [(0, "gloo", "a module"), (1, "gloo", "another shape"), *((1, "simulated", how) for how in CHANGES)],
)
def test_a_rank_that_registers_alone(who: int, backend: str, how: str) -> None:
    for end in run_once(2, backend, _registers_alone, who, how):
        assert "buffers that were registered, removed or replaced" in end, end


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
