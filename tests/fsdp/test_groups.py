"""How ranks are divided for hybrid sharding and for what stays between forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shardkit import FSDP, fully_shard
from shardkit.backend import get_backend
from shardkit.errors import ConfigurationError
from shardkit.fsdp.construct import hybrid_groups, post_forward_mesh
from tests.beside import batch, steps_beside
from tests.pools import on_ranks


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


@pytest.mark.parametrize("flatten", [True, False])
@on_ranks((2, "simulated"), (4, "simulated"))
def test_a_parameter_that_one_replica_does_not_use(rank: int, world_size: int, flatten: bool) -> None:
    """Two replicas; of whole models too, where nothing is sharded."""
    half = world_size // 2
    shards, replicas = hybrid_groups(half, backend="simulated")
    one = Branches().double()
    model = FSDP(Branches().double(), group=shards, replicas=replicas, flatten=flatten)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, one)]

    def loss(m: Any, r: int, step: int) -> torch.Tensor:
        return m(batch(r, step, 2, 3).double(), r >= half).sum()  # type: ignore[no-any-return]

    steps_beside(rank, world_size, model, one, loss, optimizers, range(2))
    torch.testing.assert_close(dict(model.state_dict()), dict(one.state_dict()))
