"""``ReducePolicy(order="fixed")`` on XLA: FSDP on 1, 2 and 4 replicas leaves the same bits, or is refused by name."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch
from torch import nn

import shardkit
from shardkit import OSS, ConfigurationError, ReducePolicy, ShardedDDP, sharding_of
from shardkit.backend import get_backend
from tests.pools import rank_pool

pytest.importorskip("torch_xla")
pytestmark = pytest.mark.xla

K = 4


def _trained(rank: int, world: int) -> tuple[list[float], str]:
    """Each micro-batch is a program of its own."""
    import torch_xla

    backend = get_backend("xla")
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).to(backend.device())
    reduce = ReducePolicy(order="fixed", microbatches=K)
    shardkit.fully_shard(model[0], reduce=reduce)
    shardkit.fully_shard(model, reduce=reduce)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    told = []
    for step in range(3):
        losses = []
        for k in range(rank, K, world):
            x = torch.randn(4, 5, generator=torch.Generator().manual_seed(step * K + k)).to(backend.device())
            loss = (model(x) - 1).square().mean()
            loss.backward()
            losses.append(loss)
            torch_xla.sync()
        told.append(shardkit.mean_loss(losses).item())
        told.append(sharding_of(model).clip_grad_norm_(0.1, float("inf")).item())
        optimizer.step()
        optimizer.zero_grad()
        torch_xla.sync()
    with pytest.raises(ConfigurationError, match="no fp64 of their own"):
        sharding_of(model).clip_grad_norm_(1.0)
    plain: Any = nn.Linear(2, 2).to(backend.device())
    with pytest.raises(ConfigurationError, match="take FSDP there"):
        ShardedDDP(plain, OSS(plain.parameters(), torch.optim.SGD, lr=0.1), reduce=reduce)
    with sharding_of(model).summon_full_params():
        bits = b"".join(v.cpu().numpy().tobytes() for v in model.state_dict().values())
    return told, hashlib.sha1(bits).hexdigest()


def test_one_two_and_four_replicas() -> None:
    found = [each for world in (1, 2, 4) for each in rank_pool(world, "xla").run(_trained, world)]
    assert found == [found[0]] * 7
