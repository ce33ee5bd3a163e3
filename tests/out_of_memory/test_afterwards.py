"""After a batch that was skipped: what is saved, buffers that it made, parameters that it changed; what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import shardkit
from shardkit import FSDP, OSS, ShardedDDP
from shardkit.fsdp.state_dict import consolidate
from shardkit.training.out_of_memory import is_out_of_memory
from shardkit.types import StateDict
from tests.pools import on_ranks, rank_pool

STEPS, RUNS_OUT = 5, 3


class _Part(nn.Module):
    """Has a buffer only once it has seen a batch of the last kind; memory may run out before its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("seen", None)
        self.runs_out = self.notes = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.runs_out:
            self.runs_out = False
            raise torch.OutOfMemoryError
        if self.notes:
            self.seen = x.detach().mean(0)
        out: torch.Tensor = self.linear(x)
        return out


def _made(door: str) -> tuple[list[_Part], nn.Module, Any]:
    torch.manual_seed(0)
    parts = [_Part(), _Part()]
    if door == "ddp":
        model = nn.Sequential(*parts)
        optimizer = OSS(model.parameters(), torch.optim.Adam, lr=0.1)
        return parts, ShardedDDP(model, optimizer), optimizer
    wrapped = FSDP(nn.Sequential(*map(FSDP, parts)))
    return parts, wrapped, torch.optim.Adam(wrapped.parameters(), lr=0.1)


def _shards(rank: int) -> tuple[StateDict, StateDict, list[int]]:
    """Trained with a batch that is skipped; the backwards of each unit."""
    parts, model, optimizer = _made("fsdp")
    skip = shardkit.SkipOutOfMemory(model)
    for step in range(STEPS):
        parts[1].runs_out = step == RUNS_OUT and rank == 1
        with skip:
            model(torch.full((2, 3), float(rank))).square().sum().backward()
        if not skip.skipped:
            optimizer.step()
        optimizer.zero_grad()
    counted = [shardkit.sharding_of(m)._state.unit.backwards for m in (model, *model.module)]
    return model.local_state_dict(), model.local_metadata_dict(), counted


def test_shards_are_of_one_save_whichever_rank_has_left_a_step() -> None:
    states, notes, counted = zip(*rank_pool(3, "simulated").run(_shards), strict=True)
    assert counted == ([STEPS - 1, 0, 0],) * 3
    assert consolidate(states, notes).keys() == nn.Sequential(_Part(), _Part()).state_dict().keys()


@pytest.mark.parametrize("door", ["fsdp", "ddp"])
@on_ranks((2, "simulated"))
def test_buffers_that_the_batch_made_go_with_it(rank: int, door: str) -> None:
    parts, model, _ = _made(door)
    skip = shardkit.SkipOutOfMemory(model)
    for step in range(STEPS):
        parts[0].notes = step >= RUNS_OUT
        parts[1].runs_out = step == RUNS_OUT and rank == 0
        with skip:
            model(torch.ones(2, 3)).square().sum().backward()
        if skip.skipped:
            assert parts[0].seen is None
    assert [p.seen is not None for p in parts] == [True, False]


def _steps_inside(rank: int, door: str, first: int) -> tuple[int, str]:
    """From which step on the optimizer steps inside; where that was said, and what."""
    parts, model, optimizer = _made(door)
    skip = shardkit.SkipOutOfMemory(model)
    for step in range(STEPS):
        parts[1].runs_out = step == RUNS_OUT and rank == 0
        try:
            with skip:
                model(torch.full((2, 3), float(rank))).square().sum().backward()
                if step >= first:
                    optimizer.step()
        except shardkit.ShardkitError as error:
            return step, f"{type(error).__name__}: {error}"
        if not skip.skipped:
            optimizer.step()
        optimizer.zero_grad()
    return STEPS, ""


@pytest.mark.parametrize(("door", "first"), [("fsdp", 0), ("ddp", 0), ("fsdp", RUNS_OUT)])
def test_a_step_inside_is_an_error_on_all_ranks(door: str, first: int) -> None:
    for step, said in rank_pool(2, "simulated").run(_steps_inside, door, first):
        assert step == first
        assert said.startswith("LifecycleError: SkipOutOfMemory: parameters were changed inside of the with")
        assert ("Rank 0 ran out of memory" in said) == (first == RUNS_OUT)


def test_others_that_step_inside_for_the_first_time_are_out_of_step() -> None:
    """The step of an OSS is a collective that the rank without memory does not know of."""
    for step, said in rank_pool(2, "simulated").run(_steps_inside, "ddp", RUNS_OUT):
        assert step == RUNS_OUT
        assert said.startswith("OutOfStepError")


@on_ranks(2)
def test_what_talks_to_other_ranks_beside_is_refused(rank: int) -> None:
    model = FSDP(nn.Linear(4, 4))
    beside = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
    with pytest.raises(shardkit.ConfigurationError, match="DistributedDataParallel talks to other ranks"):
        shardkit.SkipOutOfMemory(nn.Sequential(model, beside))
    cut = parallelize_module(nn.Linear(4, 4), init_device_mesh("cpu", (2,)), ColwiseParallel())
    with pytest.raises(shardkit.ConfigurationError, match="parameters are DTensors talks to other ranks"):
        shardkit.SkipOutOfMemory(nn.Sequential(model, cut))
    listed = shardkit.fully_shard(nn.Linear(4, 4), dtensors=True)
    with shardkit.SkipOutOfMemory(listed) as skip:
        listed(torch.ones(2, 4)).sum().backward()
    assert not skip.skipped


def test_what_another_rank_has_said_is_not_this_ranks() -> None:
    said = "rank 1 gave up: its forward raised RuntimeError: DefaultCPUAllocator: can't allocate memory"
    assert is_out_of_memory(RuntimeError(said))
    assert not is_out_of_memory(shardkit.OutOfStepError(said))
