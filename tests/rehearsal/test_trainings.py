"""Trainings give the bits of processes over gloo; many ranks need little memory."""

from __future__ import annotations

import pytest
import torch

import digits
from shardkit.tools.rehearsal import rehearse
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
