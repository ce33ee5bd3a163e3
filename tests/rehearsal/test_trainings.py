"""Trainings give the bits of processes over gloo; many ranks need little memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import digits
import shardkit
from shardkit.tools.rehearsal import rehearse
from shardkit.tools.rehearsal.bits import rehearse_bits
from tests.pools import rank_pool
from tests.rehearsal import trainings
from tests.rehearsal.test_collectives import same

WORLDS = pytest.mark.parametrize("world_size", [2, 3, 4])


@WORLDS
def test_digits_equal_gloo(world_size: int) -> None:
    drawn = torch.Generator().manual_seed(0)
    images = digits.Split(torch.randn(128, 1, 8, 8, generator=drawn), torch.arange(128) % 10)
    start = digits.Start(images, images, digits.DigitTransformer().state_dict())
    arguments = (digits.STRATEGIES, world_size, start)
    expected = rank_pool(world_size).run(trainings.digits, *arguments)
    report = rehearse(lambda rank: trainings.digits(rank, *arguments), world_size, memory=False)
    assert report.is_good, str(report)
    assert report.results == expected


def test_llama_equals_gloo() -> None:
    """With three ranks: orders of sums matter, and shards are uneven. Processes import transformers for seconds."""
    world_size = 3
    pytest.importorskip("transformers")
    strategies = ("fsdp", "ddp", "fsdp2")
    expected = rank_pool(world_size).run(trainings.llama, strategies)
    report = rehearse(lambda rank: trainings.llama(rank, strategies), world_size, memory=True)
    assert report.is_good, str(report)
    for rank in range(world_size):
        for strategy, one, other in zip(strategies, expected[rank], report.results[rank], strict=True):
            assert same(one, other), (rank, strategy)


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
    assert two.startswith("2 ranks and 1 part at step 0, parameter '0.weight', element ")
    assert three.startswith("3 ranks and 1 part at step 0, parameter '0.weight', element ")
