"""Several models in one backward, of which ranks leave other parameters without a gradient."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import ShardingStrategy

from shardkit import FSDP, OutOfStepError, fully_shard, hybrid_groups
from shardkit.torch_fsdp import FullyShardedDataParallel as TorchFSDP
from tests.beside import assert_same, batch, steps_beside
from tests.pools import rank_pool, run_once


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


class Swapped(nn.Module):
    """Two units of equal shapes, called in another order on one rank."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, is_swapped: bool) -> torch.Tensor:
        x = self.last(x)
        parts = [lambda: self.one(x).sum(), lambda: self.two(x).square().sum()]
        return sum(part() for part in reversed(parts)) if is_swapped else sum(part() for part in parts)


@pytest.mark.parametrize(("how", "ranks"), [("torch_fsdp", 2), ("alone", 2), ("fsdp", 4)])
def test_replicas_that_go_another_way_are_told(how: str, ranks: int) -> None:
    """Averages of equal shapes were mixed up, silently, where no shards of others are gathered."""
    run_once(ranks, "gloo", _goes_another_way, how)


def _goes_another_way(rank: int, how: str) -> None:
    torch.manual_seed(3)
    model, (group, replicas) = Swapped(), hybrid_groups(1 if how == "alone" else 2)

    def unit(m: nn.Module) -> nn.Module:
        if how == "torch_fsdp":
            return TorchFSDP(m, sharding_strategy=ShardingStrategy.NO_SHARD)
        return FSDP(m, group=group, replicas=replicas)

    model.one, model.two = unit(model.one), unit(model.two)  # type: ignore[assignment]
    root = unit(model)
    root(batch(rank)[:, :6], False).backward()
    with pytest.raises(OutOfStepError, match=r"gradients of parameters 0 of (one|two)"):
        root(batch(rank)[:, :6], rank // 2 == 1 if how == "fsdp" else rank == 1).backward()
