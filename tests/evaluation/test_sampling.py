"""Evaluation on uneven ranks: each sample once, FSDP's forwards in step, results in order."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from shardkit import FSDP, EvaluationSampler, gather_tensors, in_step
from shardkit.errors import ConfigurationError
from tests.pools import rank_pool


@pytest.mark.parametrize("samples", [0, 1, 2, 7, 12])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_every_sample_once(samples: int, ranks: int) -> None:
    samplers = [EvaluationSampler(range(samples), ranks, rank) for rank in range(ranks)]
    assert sorted(i for s in samplers for i in s) == list(range(samples))
    assert [len(s) for s in samplers] == [len(list(s)) for s in samplers]
    assert max(len(s) for s in samplers) == samplers[0].most
    parts = [torch.tensor(list(s), dtype=torch.int64) for s in samplers]
    assert samplers[0].in_order(parts).tolist() == list(range(samples))


def _evaluate(rank: int, samples: int) -> tuple[torch.Tensor, int]:
    torch.manual_seed(0)
    model = FSDP(nn.Sequential(FSDP(nn.Linear(4, 5)), nn.Linear(5, 2))).eval()
    data = TensorDataset(torch.randn(samples, 4, generator=torch.Generator().manual_seed(1)))
    sampler = EvaluationSampler(data)
    scores, calls = [torch.empty(0, 2)], 0
    with torch.no_grad():
        for (x,), counts in in_step(DataLoader(data, batch_size=2, sampler=sampler)):
            y = model(x)
            calls += 1
            if counts:
                scores.append(y)
    return sampler.in_order(gather_tensors(torch.cat(scores))), calls


@pytest.mark.parametrize("samples", [1, 5, 6])
def test_fsdp_on_uneven_ranks(samples: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2))
    expected = model(torch.randn(samples, 4, generator=torch.Generator().manual_seed(1)))
    results = rank_pool(3).run(_evaluate, samples)
    assert len({calls for _, calls in results}) == 1
    for scores, _ in results:
        torch.testing.assert_close(scores, expected)


def test_mistakes() -> None:
    with pytest.raises(ConfigurationError, match="rank 2 of 2"):
        EvaluationSampler(range(4), 2, 2)
    with pytest.raises(ConfigurationError, match="EvaluationSampler"):
        next(in_step(DataLoader(range(4), batch_size=2)))
    with pytest.raises(ConfigurationError, match=r"\[2, 2\] samples"):
        EvaluationSampler(range(4), 2, 0).in_order([torch.zeros(2), torch.zeros(1)])
