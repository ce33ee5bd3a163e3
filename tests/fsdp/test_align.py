"""``align=``: where parameters lie in the flat parameter, and what says so."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

import shardkit
from shardkit.errors import ConfigurationError, RankMismatchError
from shardkit.layout import Align
from tests.pools import on_ranks, rank_pool

ALIGNMENTS: list[Align] = ["parameters", "rows", 8, None]


class Model(nn.Module):
    """A scalar first: what comes after it lies at odd addresses."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.inner = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * self.inner(x)


def _trained(align: Align, door: str = "wrapper", steps: int = 2) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model: nn.Module = Model().double()
    model = (
        shardkit.FSDP(model, align=align) if door == "wrapper" else shardkit.fully_shard(model, align=align)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    x = torch.linspace(-1, 1, 24, dtype=torch.float64).view(4, 6)
    for _ in range(steps):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return model, optimizer


def _places(rank: int, align: Align) -> list[tuple[bool, int]]:
    """For each parameter: whether it begins at 16 bytes, and in how many shards it lies."""
    model: Any = _trained(align, steps=0)[0]
    (flat,) = model._state.flats
    counts = [sum(p.item == k for p in flat.layout.pieces()) for k in range(len(flat.originals))]
    return [(start % 2 == 0, n) for start, n in zip(flat.layout.offsets(), counts, strict=True)]


def test_parameters_begin_and_are_cut_where_it_was_asked() -> None:
    end_to_end = rank_pool(2, "simulated").run(_places, None)[0]
    assert [aligned for aligned, _ in end_to_end] == [True, False, False, True, False]
    assert [n for _, n in end_to_end] == [1, 2, 1, 1, 1]
    assert all(n == 1 for _, n in rank_pool(2, "simulated").run(_places, "parameters")[0])
    assert all(aligned for aligned, _ in rank_pool(2, "simulated").run(_places, 2)[0])


def _checkpoints(rank: int, align: Align) -> tuple[Any, ...]:
    model: Any
    model, optimizer = _trained(align)
    full = model.state_dict()
    states = [model.gather_full_optim_state_dict(optimizer)]
    torch.distributed.broadcast_object_list(states)
    (state,) = states
    again: Any
    again, other = _trained(align, steps=1)
    again.load_local_state_dict(model.local_state_dict())
    other.load_state_dict(again.get_shard_from_optim_state_dict(state))
    return full, state, again.state_dict(), again.gather_full_optim_state_dict(other), (
        model.local_state_dict(), model.local_metadata_dict()
    )  # fmt: skip


def test_checkpoints_of_all_alignments_are_one() -> None:
    world_size = 3
    plain = rank_pool(world_size).run(_checkpoints, None)[0]
    for align in ALIGNMENTS[:-1]:
        ranks = rank_pool(world_size).run(_checkpoints, align)
        full, state, again, state_again, _ = ranks[0]
        torch.testing.assert_close(full, plain[0])
        torch.testing.assert_close(state["state"], plain[1]["state"])
        torch.testing.assert_close(again, full, rtol=0, atol=0)
        torch.testing.assert_close(state_again["state"], state["state"], rtol=0, atol=0)
        parts = [r[4] for r in ranks]
        joined = shardkit.FSDP.consolidate_shard_weights([p[0] for p in parts], [p[1] for p in parts])
        torch.testing.assert_close(joined, dict(full), rtol=0, atol=0)


def _small_gaps(rank: int) -> tuple[Any, Any, Any]:
    model: Any = shardkit.FSDP(nn.Linear(3, 1), align=4)
    return model.local_state_dict(), model.local_metadata_dict(), dict(model.state_dict())


def test_a_shard_as_long_as_all_parameters_is_not_taken_for_all() -> None:
    (first, meta, full), second = rank_pool(2).run(_small_gaps)
    assert first["flat_param_0"].numel() == 4  # 3 + 1, which lie at 0 and at 4
    joined = shardkit.FSDP.consolidate_shard_weights([first, second[0]], [meta, second[1]])
    torch.testing.assert_close(joined, full, rtol=0, atol=0)


@on_ranks(2)
def test_shards_of_another_alignment_are_refused(rank: int) -> None:
    model: Any = _trained("rows", steps=0)[0]
    model.inner.requires_grad_(True)
    local = model.local_state_dict()
    said = []
    for align in ("parameters", 16, None):
        other: Any = _trained(align, steps=0)[0]  # type: ignore[arg-type]
        with pytest.raises(ConfigurationError) as error:
            other.load_local_state_dict(local)
        said.append(str(error.value))
    assert all("Nothing was loaded on any rank" in text for text in said)


def _in_place(rank: int) -> list[int]:
    model, _ = _trained("rows", "in place")
    wrapped, _ = _trained(None)
    with shardkit.sharding_of(model).summon_full_params():
        mine = {n: p.detach().clone() for n, p in model.named_parameters()}
    with wrapped.summon_full_params():  # type: ignore[operator]
        for name, p in wrapped.module.named_parameters():  # type: ignore[union-attr]
            torch.testing.assert_close(mine[name], p.detach())
    return [p.numel() for p in model.parameters()]


def test_rows_in_place_are_whole_on_one_rank() -> None:
    """Parts of a parameter are whole rows, and together all of them."""
    parts = rank_pool(3).run(_in_place)
    assert [sum(numels) for numels in zip(*parts, strict=True)] == [1, 5 * 6, 5, 3 * 5, 3]


@on_ranks(2)
def test_what_is_no_alignment_is_refused(rank: int) -> None:
    for wrong in ("columns", 0, -1, 1.5, True):
        with pytest.raises(ConfigurationError, match="align="):
            shardkit.FSDP(nn.Linear(2, 2), align=wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="which lists a flat parameter"):
        shardkit.fully_shard(nn.Linear(2, 2), align="parameters")
    with pytest.raises(RankMismatchError, match="align"):
        shardkit.FSDP(nn.Linear(2, 2), align="rows" if rank else 4)


def test_padding_is_told(caplog: pytest.LogCaptureFixture) -> None:
    def told(rank: int) -> None:
        shardkit.FSDP(nn.Linear(100_000, 1), align="parameters")  # half of it is padding
        shardkit.FSDP(nn.Linear(100, 1), align=4)

    with caplog.at_level(logging.INFO, logger="shardkit"):
        rank_pool(2, "simulated").run(told)
    found = [(r.levelname, r.getMessage()) for r in caplog.records if "padding" in r.getMessage()]
    assert [level for level, _ in found] == ["WARNING", "INFO"]
    assert "costs 99999 elements of padding, 50.0 %" in found[0][1]


def _begins_off_16_bytes(rank: int, dtensors: bool) -> list[bool]:
    """Tells of each matrix with rows of a multiple of 16 bytes where it begins in forward; odd ones come first."""
    model: Any = Model()
    model.inner = nn.Sequential(nn.Linear(40, 23), nn.Linear(23, 40, bias=False), nn.Linear(40, 24))
    shardkit.fully_shard(model.bfloat16(), dtensors=dtensors)
    off: list[bool] = []
    for layer in (model.inner[0], model.inner[2]):
        layer.register_forward_pre_hook(lambda m, _: off.append(m.weight.data_ptr() % 16 > 0))
    model(torch.ones(4, 40, dtype=torch.bfloat16)).sum().backward()
    return off


@pytest.mark.parametrize("dtensors", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_matrices_begin_at_16_bytes_behind_odd_parameters(world_size: int, dtensors: bool) -> None:
    """Devices compute several times slower with bf16 matrices that don't."""
    ranks = rank_pool(world_size).run(_begins_off_16_bytes, dtensors)
    assert ranks == [[False, False]] * world_size
