"""How ranks are divided for hybrid sharding and for what stays between forward and backward."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardkit import FSDP, fully_shard
from shardkit.backend import get_backend
from shardkit.errors import ConfigurationError
from shardkit.fsdp.construct import hybrid_groups, post_forward_mesh
from tests.pools import on_ranks, rank_pool


@on_ranks(*[(ranks, "simulated") for ranks in (1, 2, 4, 6)])
def test_every_rank_is_in_one_group_of_each_kind(rank: int, world_size: int) -> None:
    everyone = get_backend("simulated").group(None)
    for shard_size in (n for n in range(1, world_size + 1) if world_size % n == 0):
        shards, replicas = hybrid_groups(shard_size, backend="simulated")
        first = rank - rank % shard_size
        assert tuple(shards.ranks) == tuple(range(first, first + shard_size))
        assert tuple(replicas.ranks) == tuple(range(rank % shard_size, everyone.world_size, shard_size))
        mesh = post_forward_mesh(everyone, shard_size)
        assert tuple(mesh.ranks) == tuple(shards.ranks)
        assert post_forward_mesh(everyone, shard_size) is mesh


@on_ranks((3, "simulated"))
def test_numbers_that_do_not_divide_the_ranks(rank: int) -> None:
    with pytest.raises(ConfigurationError, match=r"groups of 2\. .* factor of 3, not 2"):
        hybrid_groups(2, backend="simulated")
    for count in (2, 4, 6):  # more than there are, too
        with pytest.raises(ConfigurationError, match=rf"groups of {count}\. .* factor of 3, not {count}"):
            fully_shard(nn.Linear(4, 5), reshard_after_forward=count, dtensors=False, backend="simulated")


class Branches(nn.Module):
    """Some ranks leave the second layer out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        y: torch.Tensor = self.first(x)
        return y + self.second(x) if both else y


def _unused_by_one_replica(rank: int, shard_size: int, flatten: bool) -> None:
    shards, replicas = hybrid_groups(shard_size, backend="simulated")
    ranks = 2 * shard_size
    one = Branches().double()
    model = FSDP(Branches().double(), group=shards, replicas=replicas, flatten=flatten)
    optimizer, alone = (torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, one))
    for step in range(2):
        optimizer.zero_grad()
        alone.zero_grad()
        batches = [
            torch.randn(2, 3, generator=torch.Generator().manual_seed(10 * step + r), dtype=torch.float64)
            for r in range(ranks)
        ]
        model(batches[rank], rank >= shard_size).sum().backward()
        for r, batch in enumerate(batches):
            (one(batch, r >= shard_size).sum() / ranks).backward()
        optimizer.step()
        alone.step()
    torch.testing.assert_close(dict(model.state_dict()), dict(one.state_dict()))


@pytest.mark.parametrize("flatten", [True, False])
@pytest.mark.parametrize("shard_size", [1, 2])
def test_a_parameter_that_one_replica_does_not_use(shard_size: int, flatten: bool) -> None:
    """Replicas of whole models too, where nothing is sharded."""
    rank_pool(2 * shard_size, "simulated").run(_unused_by_one_replica, shard_size, flatten)
