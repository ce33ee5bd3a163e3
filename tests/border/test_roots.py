"""Several models in one backward, of which ranks leave other parameters without a gradient."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import ShardingStrategy

from shardkit import FSDP, fully_shard, hybrid_groups
from shardkit.torch_fsdp import FullyShardedDataParallel as TorchFSDP
from tests.beside import assert_same, batch, steps_beside
from tests.pools import rank_pool


class Part(nn.Module):
    """A unit inside of a root, one of whose layers is for some ranks alone."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.spare, self.unit = nn.Linear(6, width), nn.Linear(width, width), nn.Linear(width, 6)

    def forward(self, x: torch.Tensor, has_spare: bool) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        return self.unit(self.spare(x) if has_spare else x)


def _chain() -> nn.ModuleList:
    torch.manual_seed(3)
    return nn.ModuleList([Part(5), Part(7)])


def _loss(model: nn.ModuleList, rank: int, step: int) -> torch.Tensor:
    x = batch(rank, step)
    for part in model:
        x = part(x, rank == 1)
    return x.square().mean()


def _wrap(part: Part, how: str) -> nn.Module:
    if how == "torch_fsdp":
        part.unit = TorchFSDP(part.unit, sharding_strategy=ShardingStrategy.NO_SHARD)  # type: ignore[assignment]
        return TorchFSDP(part, sharding_strategy=ShardingStrategy.NO_SHARD)
    group, replicas = hybrid_groups(1 if how == "alone" else 2)
    if how == "fsdp":
        part.unit = FSDP(part.unit, group=group, replicas=replicas)  # type: ignore[assignment]
        return FSDP(part, group=group, replicas=replicas)
    fully_shard(part.unit, group=group, replicas=replicas)
    return fully_shard(part, group=group, replicas=replicas)


@pytest.mark.parametrize(("how", "ranks"), [("torch_fsdp", 2), ("alone", 3), ("fsdp", 4), ("in_place", 4)])
def test_replicas_meet_in_one_order(how: str, ranks: int) -> None:
    """The first root's last average over replicas comes before those of the second, on all ranks."""
    rank_pool(ranks).run(_trained, how, ranks)


def _trained(rank: int, how: str, ranks: int) -> None:
    plain, model = _chain(), _chain()
    for k in range(2):
        model[k] = _wrap(model[k], how)
    steps_beside(rank, ranks, model, plain, _loss)
    for mine, truth in zip(model, plain, strict=True):
        assert_same(mine, truth, how)
