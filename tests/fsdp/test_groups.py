"""How ranks are divided for hybrid sharding and for what stays between forward and backward."""

from __future__ import annotations

import pytest

from shardkit.backend import get_backend
from shardkit.errors import ConfigurationError
from shardkit.fsdp.groups import hybrid_groups, post_forward_mesh
from tests.pools import rank_pool


def _divide(rank: int, shard_size: int) -> None:
    everyone = get_backend("simulated").group(None)
    shards, replicas = hybrid_groups(shard_size, backend="simulated")
    first = rank - rank % shard_size
    assert tuple(shards.ranks) == tuple(range(first, first + shard_size))
    assert tuple(replicas.ranks) == tuple(range(rank % shard_size, everyone.world_size, shard_size))
    mesh = post_forward_mesh(everyone, shard_size)
    assert tuple(mesh.ranks) == tuple(shards.ranks)
    assert post_forward_mesh(everyone, shard_size) is mesh


@pytest.mark.parametrize("world_size", [1, 2, 4, 6])
def test_every_rank_is_in_one_group_of_each_kind(world_size: int) -> None:
    for shard_size in range(1, world_size + 1):
        if world_size % shard_size == 0:
            rank_pool(world_size, "simulated").run(_divide, shard_size)


def _cannot(rank: int) -> None:
    with pytest.raises(ConfigurationError, match="3 ranks can't be divided into groups of 2"):
        hybrid_groups(2, backend="simulated")


def test_numbers_that_do_not_divide_the_ranks() -> None:
    rank_pool(3, "simulated").run(_cannot)
