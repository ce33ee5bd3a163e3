"""One rank leaves a step out, by an error that its program catches: all hear of it, and none of steps that all take."""

from __future__ import annotations

import copy
import re
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardkit import FSDP, OSS, ShardedDDP, WholeParameters, fully_shard, save_training, sharding_of
from shardkit.errors import ShardkitError
from shardkit.torch_fsdp import FullyShardedDataParallel as TorchFSDP
from tests.pools import on_ranks, run_once

FSDPS = ("FSDP", "fully_shard", "torch_fsdp", "WholeParameters")
BAD = 2  # the step in which rank 0 raises


def _block() -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5))


def _made(door: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(_block(), _block())
    if door == "ShardedDDP":
        optimizer = OSS(model.parameters(), torch.optim.Adam, lr=0.1)
        return ShardedDDP(model, optimizer), optimizer
    wrap: Any = {"FSDP": FSDP, "torch_fsdp": TorchFSDP}.get(door, fully_shard)
    options = {"dtensors": True} if door == "dtensors" else {}
    if door != "one process":
        model = wrap(nn.Sequential(*(wrap(block, **options) for block in model.children())), **options)
    if door == "WholeParameters":
        return model, WholeParameters(model, torch.optim.Adam, lr=0.1)
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def _x(rank: int, step: int) -> torch.Tensor:
    return torch.randn(3, 5, generator=torch.Generator().manual_seed(10 * step + rank))


def _ends(rank: int, door: str, where: str) -> str:
    model, optimizer = _made(door)
    try:
        for step in range(6):
            raises = rank == 0 and step == BAD
            try:
                if raises and where == "data":
                    raise KeyError
                if raises and where == "forward":
                    model(_x(rank, step)[:, 1:])
                loss = model(_x(rank, step)).square().mean()
                if raises and where == "loss":
                    raise KeyError
                loss.backward()
                if raises and where == "metric":
                    raise KeyError
                optimizer.step()
            except (KeyError, RuntimeError) as error:
                if isinstance(error, ShardkitError):
                    raise
            optimizer.zero_grad()
            if where == "metric":
                with torch.no_grad():
                    model(_x(rank, step))
    except ShardkitError as error:
        told = f"{type(error).__name__}: {error}"
        return told + ", timed out" * ("timed out" in "".join(traceback.format_exception(error)))
    return "went on"


WORDS = {"metric": "a step", "ShardedDDP": "after 1 forwards that had none"}
# ShardedDDP's metric is in tests/faults/cases.py: devices with streams refuse an order across channels by themselves
CASES = [(door, where) for door in FSDPS for where in ("metric", "loss", "forward")]
CASES += [("ShardedDDP", "loss"), ("ShardedDDP", "forward")]


ON = [(door, where, (size, "simulated")) for door, where in CASES for size in (2, 3)]
ON += [("dtensors", "metric", (2, "gloo")), ("ShardedDDP", "forward", (2, "gloo"))]


@pytest.mark.parametrize(
    ("door", "where", "world"), ON, ids=lambda v: v if isinstance(v, str) else f"{v[1]}{v[0]}"
)
def test_an_error_that_one_rank_catches(door: str, where: str, world: tuple[int, str]) -> None:
    for end in run_once(*world, _ends, door, where):
        assert re.match(r"OutOfStepError: .*rank 0", end), end
        assert re.search(WORDS.get(where, WORDS.get(door, "")), end), end
        assert "timed out" not in end, "that it had waited a moment is no cause"


def _saves(rank: int, door: str, folder: str) -> str:
    model, optimizer = _made(door)
    try:
        for step in range(3):
            model(_x(rank, step)).square().mean().backward()
            if not (rank == 0 and step == 2):  # the last one before a checkpoint
                optimizer.step()
            optimizer.zero_grad()
        save_training(folder, model=model, optimizer=optimizer, step=3)
    except ShardkitError as error:
        return f"{type(error).__name__}: {error}"
    return "went on"


@pytest.mark.parametrize(
    ("door", "world"),
    [(door, (size, "simulated")) for door in (*FSDPS, "ShardedDDP") for size in (2, 3)]
    + [("dtensors", (2, "gloo")), ("ShardedDDP", (3, "gloo"))],
)
def test_no_checkpoint_is_written_of_ranks_that_part(
    door: str, world: tuple[int, str], tmp_path: Path
) -> None:
    for end in run_once(*world, _saves, door, str(tmp_path)):
        assert re.match(r"OutOfStepError: .*rank 0", end), end
    assert not [*tmp_path.glob("step-*")]


def _sequences(rank: int, world_size: int, door: str) -> torch.Tensor:
    """Several forwards go into one backward, another number on each rank; some have no graph at all."""
    model, optimizer = _made(door)
    ranks = range(world_size) if door == "one process" else [rank]
    if door != "one process":
        for p in model.parameters():
            p.requires_grad_(False)
        for _ in range(rank + 1):
            model(_x(rank, 9))
        for p in model.parameters():
            p.requires_grad_(True)
    for step in range(4):
        loss = torch.zeros(())
        for r in ranks:
            hidden = _x(r, step)
            for _ in range(1 + (r + step) % 3):
                hidden = model(hidden)
            loss = loss + hidden.square().mean() / len(ranks)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        return model(_x(0, 20))  # type: ignore[no-any-return]


@on_ranks(2, 3)
def test_forwards_of_one_backward(rank: int, world_size: int) -> None:
    truth = _sequences(rank, world_size, "one process")
    torch.testing.assert_close(_sequences(rank, world_size, "ShardedDDP"), truth, rtol=1e-4, atol=1e-5)


def _unlike_steps(rank: int, world_size: int, door: str) -> torch.Tensor:
    """Steps that all ranks take, no two of them alike: accumulated, skipped, with a closure, by several optimizers."""
    model, optimizer = _made(door)
    ranks = range(world_size) if door == "one process" else [rank]

    def backward(step: int, forwards: int = 1) -> torch.Tensor:
        for _ in range(forwards - 1):  # whose backward never comes
            model(_x(rank, step))
        loss = sum((model(_x(r, step)).square().mean() for r in ranks), torch.zeros(())) / len(ranks)
        loss.backward()
        return loss

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        return backward(7)

    for step in range(12):
        for micro in range(1 + step % 3):
            backward(step + micro, 1 + step % 2)
        if step % 4 != 3:  # where it is 3, a gradient was too large, on all ranks
            optimizer.step()
        if step == 5:
            optimizer.step(closure)
        if step == 8:
            optimizer.step()
            state = optimizer.state_dict(**({"all_ranks": True} if door == "ShardedDDP" else {}))
            if door not in ("ShardedDDP", "WholeParameters"):
                optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
            optimizer.load_state_dict(state)
        optimizer.zero_grad()
        if door == "ShardedDDP" and rank == 0:  # which is no collective there
            with torch.no_grad():
                model(_x(rank, step))
    with torch.no_grad():
        return model(_x(0, 20))  # type: ignore[no-any-return]


@pytest.mark.parametrize("door", [*FSDPS, "ShardedDDP", "dtensors"])
@on_ranks(2, 3)
def test_steps_that_all_ranks_take(rank: int, world_size: int, door: str) -> None:
    truth = _unlike_steps(rank, world_size, "one process")
    torch.testing.assert_close(_unlike_steps(rank, world_size, door), truth, rtol=1e-4, atol=1e-5)


def _halves(rank: int, door: str) -> None:
    """A model over all ranks, and an expert over each half of them, which step at other times, as halves need them."""
    half, groups = rank // 2, [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    wrap: Any = {"FSDP": FSDP, "torch_fsdp": TorchFSDP}.get(door, fully_shard)
    options = {"dtensors": True} if door == "dtensors" else {}
    group = {"process_group" if door == "torch_fsdp" else "group": groups[half]}
    torch.manual_seed(0)
    truth = [_block() for _ in range(3)]  # all ranks', and each half's
    dense, expert = (
        wrap(copy.deepcopy(truth[0]), **options),
        wrap(copy.deepcopy(truth[1 + half]), **group, **options),
    )
    mine, plain = (
        [torch.optim.Adam(m.parameters(), lr=0.1) for m in each] for each in ((dense, expert), truth)
    )
    for step in range(6):
        has = [(step + k) % 2 == 0 for k in range(2)]
        hidden = dense(_x(rank, step))
        (expert(hidden) if has[half] else hidden).square().mean().backward()
        for r in range(4):
            hidden = truth[0](_x(r, step))
            hidden = truth[1 + r // 2](hidden) if has[r // 2] else hidden
            (hidden.square().mean() / 4).backward()
        for p in (*truth[1].parameters(), *truth[2].parameters()):
            if p.grad is not None:
                p.grad.mul_(2)  # of two ranks it is the mean
        for optimizer, steps in zip((*mine, *plain), (True, has[half], True, *has), strict=True):
            if steps:
                optimizer.step()
            optimizer.zero_grad()
    for made, one in ((dense, truth[0]), (expert, truth[1 + half])):
        exported: Any = sharding_of(made).export()
        torch.testing.assert_close(dict(exported), {n: p.detach() for n, p in one.named_parameters()})


@pytest.mark.parametrize("door", ["FSDP", "fully_shard", "dtensors", "torch_fsdp"])
@on_ranks(4)
def test_groups_that_step_at_other_times(rank: int, door: str) -> None:
    _halves(rank, door)
