"""Ranks with different numbers of micro-batches (``shardkit.uneven``), beside one process over all of them."""

from __future__ import annotations

import contextlib
import itertools
import logging
import random
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardkit
from shardkit import ConfigurationError, LifecycleError, ShardedDDP, fully_shard, hybrid_groups, sharding_of
from shardkit.errors import RankFailedError
from tests.border.strategies import heard
from tests.figures.counters import OperationCounter
from tests.fsdp.test_export import by_root
from tests.pools import rank_pool, run_once

WIDTH = 13


class Net(nn.Module):
    """Blocks of different sizes, one computed anew in backward, a tied weight, something frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        sizes = (WIDTH, 40, 3, WIDTH)
        self.blocks = nn.ModuleList([nn.Linear(a, b) for a, b in itertools.pairwise(sizes)])
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for k, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=False) if k == 1 else block(x)
            x = torch.tanh(x)
        out: torch.Tensor = self.head(x + self.frozen(x)) @ self.head.weight
        return out


def _loss(model: nn.Module, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return model(torch.randn(3, WIDTH, generator=generator, dtype=torch.float64)).square().mean()


def _sharded(way: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    model: nn.Module = Net()
    if way == "ShardedDDP":
        optimizer = shardkit.OSS(
            [p for p in model.parameters() if p.requires_grad], torch.optim.AdamW, lr=1e-2
        )
        return ShardedDDP(model, optimizer), optimizer
    options: dict[str, Any] = {"dtensors": True} if way == "dtensors" else {}
    if way == "hybrid":
        options["group"], options["replicas"] = hybrid_groups(2)
    for name in ("0", "1", "2"):
        block = model.blocks._modules[name]
        model.blocks._modules[name] = (
            by_root(block, **options) if way in ("FSDP", "hybrid") else fully_shard(block, **options)
        )
    model = by_root(model, **options) if way in ("FSDP", "hybrid") else fully_shard(model, **options)
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def _train(rank: int, way: str, counts: list[list[int]], local: bool, weighted: bool) -> list[str]:
    with heard(logging.WARNING) as lines:
        _compare(rank, way, counts, local, weighted)
        return lines.copy()


def _compare(rank: int, way: str, counts: list[list[int]], local: bool, weighted: bool) -> None:
    plain = Net()
    truth = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=1e-2)
    model, optimizer = _sharded(way)
    for step, per_rank in enumerate(counts):
        with shardkit.uneven(model) as work:
            inside: Any = sharding_of(model).no_sync() if way != "ShardedDDP" else model.no_sync()
            with inside if local else contextlib.nullcontext():
                for k in range(per_rank[rank]):
                    loss = _loss(model, 1000 * step + 10 * k + rank)
                    (work.weighted(loss, 1 + k) if weighted else loss).backward()
        total = sum(1 + k if weighted else 1 for n in per_rank for k in range(n))
        for r, n in enumerate(per_rank):
            for k in range(n):
                ((1 + k if weighted else 1) / total * _loss(plain, 1000 * step + 10 * k + r)).backward()
        if way != "ShardedDDP":
            norm = sharding_of(model).clip_grad_norm_(1e9)
            expected = nn.utils.clip_grad_norm_(plain.parameters(), 1e9)
            assert float(norm) == pytest.approx(float(expected), rel=1e-12)
        for each in (optimizer, truth):
            each.step()
            each.zero_grad()
    found = {n.removeprefix("module."): p for n, p in model.state_dict().items()}
    found = {n: getattr(p, "full_tensor", lambda p=p: p)() for n, p in found.items()}
    torch.testing.assert_close(found, dict(plain.state_dict()), rtol=1e-12, atol=1e-12)


def _counts(world_size: int, seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    drawn = [[draw.choice((0, 0, 1, 2, 5)) for _ in range(world_size)] for _ in range(4)]
    return [*drawn, [0] * world_size, [1] * world_size, [2, *[0] * (world_size - 1)]]


@pytest.mark.parametrize("way", ["FSDP", "fully_shard", "dtensors", "ShardedDDP"])
def test_any_number_of_micro_batches_is_one_process(way: str) -> None:
    for world_size in (2, 3):
        pool = rank_pool(world_size)
        assert not any(
            pool.run(_train, way, [[0, *[2] * (world_size - 1)], *_counts(world_size, 1)], False, True)
        )
        assert not any(pool.run(_train, way, _counts(world_size, world_size), True, False))
    rank_pool(1).run(_train, way, [[2], [0], [1]], False, True) if way == "FSDP" else None


def test_replicas_have_different_numbers_too() -> None:
    rank_pool(4).run(_train, "hybrid", [[0, 0, 2, 1], *_counts(4, 5)], False, False)


def _drawn_steps(rank: int, seed: int) -> None:
    """Short programs: another way, other numbers, weights and kinds of accumulation each time."""
    draw = random.Random(seed)
    world_size = 2 + seed % 7
    for way in draw.sample(["FSDP", "fully_shard", "ShardedDDP"], 2):
        counts = [[draw.choice((0, 0, 1, 1, 2, 5)) for _ in range(world_size)] for _ in range(3)]
        _compare(rank, way, counts, draw.random() < 0.3, draw.random() < 0.5)


def test_drawn_steps_on_simulated_ranks() -> None:
    for seed in range(7):
        rank_pool(2 + seed % 7, "simulated").run(_drawn_steps, seed)


def _whole_parameters(rank: int) -> None:
    """An optimizer that needs whole matrices, and a loss scale."""
    plain, model = Net().float(), fully_shard(Net().float())
    optimizer = shardkit.WholeParameters(model, torch.optim.Adafactor, lr=0.05)
    truth = torch.optim.Adafactor([p for p in plain.parameters() if p.requires_grad], lr=0.05)
    scaler = shardkit.ShardedGradScaler(init_scale=8.0)
    for step, per_rank in enumerate([[1, 2], [0, 2], [3, 0]]):
        with shardkit.uneven(model):
            for k in range(per_rank[rank]):
                scaler.scale(_loss32(model, 100 * step + 10 * k + rank)).backward()
        for r, n in enumerate(per_rank):
            for k in range(n):
                (_loss32(plain, 100 * step + 10 * k + r) / sum(per_rank)).backward()
        scaler.unscale_(optimizer)
        sharding_of(model).clip_grad_norm_(0.5)
        nn.utils.clip_grad_norm_([p for p in plain.parameters() if p.requires_grad], 0.5)
        scaler.step(optimizer)
        scaler.update()
        truth.step()
        model.zero_grad()
        plain.zero_grad()
    torch.testing.assert_close(
        dict(sharding_of(model).export()), dict(plain.state_dict()), rtol=1e-4, atol=1e-5
    )


def _loss32(model: nn.Module, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return model(torch.randn(3, WIDTH, generator=generator)).square().mean()


def test_with_whole_parameters_clipping_and_a_loss_scale() -> None:
    rank_pool(2).run(_whole_parameters)


def _costs(rank: int) -> float:
    model, _ = _sharded("FSDP")
    for _ in range(2):
        with OperationCounter(2) as counter, shardkit.uneven(model):
            for k in range(2 * rank):
                _loss(model, k).backward()
        model.zero_grad()
    return counter.sent


def test_a_rank_that_is_through_sends_what_others_send() -> None:
    idle, busy = rank_pool(2).run(_costs)
    assert idle == pytest.approx(busy, abs=200)  # and some words on the control channel


def _refused(rank: int) -> None:
    model, _ = _sharded("FSDP")
    with pytest.raises(LifecycleError, match="had no backward"), shardkit.uneven(model):
        _loss(model, 0) + _loss(model, 0)
    model, _ = _sharded("fully_shard")
    with pytest.raises(LifecycleError, match="evaluation inside"), shardkit.uneven(model), torch.no_grad():
        _loss(model, 0)
    with pytest.raises(ConfigurationError, match="sharded as a whole"):
        shardkit.uneven(Net())
    _loss(model, 0).backward()
    with pytest.raises(LifecycleError, match="outermost"):
        shardkit.uneven(model.blocks[0])
    # gradients from before are added to
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    with shardkit.uneven(model):
        if rank:
            _loss(model, 0).backward()
    found = [p.grad for p in model.parameters() if p.grad is not None]
    torch.testing.assert_close(found, [2 * g for g in expected])


def test_what_is_refused() -> None:
    rank_pool(2).run(_refused)


def _raises(rank: int, after: int) -> None:
    model, _ = _sharded("FSDP")
    with shardkit.uneven(model):
        for k in range(2 if rank else 0):
            _loss(model, k).backward()
            if k == after:
                raise ValueError("a bad batch")


@pytest.mark.parametrize("after", [0, 1])
def test_an_error_on_one_rank_ends_all(after: int) -> None:
    with pytest.raises(RankFailedError, match="rank 1 failed with ValueError"):
        run_once(2, "gloo", _raises, after)


def _mixed(rank: int) -> None:
    model, _ = _sharded("FSDP")
    with shardkit.uneven(model):
        if rank:
            with sharding_of(model).no_sync() if rank == 1 else contextlib.nullcontext():
                _loss(model, 0).backward()


def test_no_sync_on_some_ranks_alone_is_told() -> None:
    with pytest.raises(RankFailedError, match=r"no_sync|different call|lost"):
        run_once(3, "gloo", _mixed)
