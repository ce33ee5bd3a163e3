"""torch.distributed between simulated ranks: the same bits as between processes over gloo."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit.errors import BackendError
from shardkit.tools.rehearsal import rehearse, surroundings
from tests.pools import rank_pool
from tests.rehearsal import programs

calls = st.tuples(
    st.sampled_from(programs.OPERATIONS[:-1]),
    st.sampled_from([1, 2, 5, 17, 1000]),
    st.sampled_from(["float32", "float64", "bfloat16", "int64"]),
    st.booleans(),
)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def compare(world_size: int, sequence: list[tuple[str, int, str, bool]]) -> None:
    expected = rank_pool(world_size).run(programs.run, sequence)
    report = rehearse(lambda rank: programs.run(rank, sequence), world_size, memory=False)
    assert report.is_good, str(report)
    for rank in range(world_size):
        for call, one, other in zip(sequence, expected[rank], report.results[rank], strict=True):
            assert same(one, other), (rank, call, one, other)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_every_collective_equals_gloo(world_size: int) -> None:
    # their import takes seconds
    names = [n for n in programs.OPERATIONS if n != "functional" or world_size == 3]
    compare(world_size, [(name, 17, "float32", k % 2 == 0) for k, name in enumerate(names)])


@settings(max_examples=6, deadline=None, derandomize=True)
@given(st.sampled_from([2, 3, 4]), st.lists(calls, min_size=1, max_size=12))
def test_drawn_sequences_equal_gloo(world_size: int, sequence: list[tuple[str, int, str, bool]]) -> None:
    compare(world_size, sequence)


def test_torch_is_as_before_afterwards() -> None:
    before = dist.distributed_c10d._world, torch.Tensor.backward, dist.distributed_c10d.rendezvous
    assert rehearse(lambda rank: dist.get_world_size(), 3).results == [3, 3, 3]
    assert before == (dist.distributed_c10d._world, torch.Tensor.backward, dist.distributed_c10d.rendezvous)


def test_what_another_torch_keeps_of_groups_is_each_ranks_own(monkeypatch: pytest.MonkeyPatch) -> None:
    shared: dict[int, str] = {}
    world = type(dist.distributed_c10d._world)
    monkeypatch.setattr(world, "pg_colors", property(lambda _: shared), raising=False)

    def colour(rank: int) -> list[int]:
        colours = dist.distributed_c10d._world.pg_colors  # type: ignore[attr-defined]
        colours[rank] = "green"
        return list(colours)

    assert rehearse(colour, 2).results == [[0], [1]]
    assert not shared


def test_another_torch_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    surroundings.check()
    monkeypatch.delattr(dist.distributed_c10d, "_new_process_group_helper")
    with pytest.raises(BackendError, match="_new_process_group_helper"):
        rehearse(lambda rank: None, 2)
