"""What is in flight on a device's streams when a step ends otherwise than it should: memory outlives its uses.

On the simulated device memory that is given back too early is an error, and values that nobody waited for are NaN.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shardkit
from shardkit import OSS, OffloadPolicy, ReducePolicy, ShardedDDP, sharding_of
from tests.backends.streams_device import current_device
from tests.beside import batch
from tests.doors import through

WORLD_SIZE, UNITS = 3, 4
Step = Callable[["Model", nn.Module, Any], None]


class Dead(RuntimeError):
    """What a test raises in the middle of a step."""


class Model(nn.Module):
    """Units in a row; a step may stop after some of them, or die in one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(UNITS))
        self.used, self.dies = UNITS, ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for k, block in enumerate(self.blocks[: self.used]):
            if k == 2 and self.dies == "forward":
                raise Dead
            x = block(x)
            if k == 1 and self.dies == "backward":
                x.register_hook(_die)
        return x


def _die(gradient: torch.Tensor) -> None:
    raise Dead


# ------------------------------------------------------------------ what a step may be
def dies_in_backward(model: Model, called: nn.Module, x: torch.Tensor) -> None:
    model.dies = "backward"
    with pytest.raises(Dead):
        called(x).square().mean().backward()
    model.dies = ""


def dies_in_forward(model: Model, called: nn.Module, x: torch.Tensor) -> None:
    model.dies = "forward"
    with pytest.raises(Dead):
        called(x)
    model.dies = ""


def stops_early(model: Model, called: nn.Module, x: torch.Tensor) -> None:
    """Units that were gathered ahead, as in the steps before, are not used."""
    model.used = 2
    called(x).square().mean().backward()
    model.used = UNITS


def stops_early_and_drops_it(model: Model, called: nn.Module, x: torch.Tensor) -> None:
    model.used = 3
    called(x)
    model.used = UNITS


def has_no_backward(model: Model, called: nn.Module, x: torch.Tensor) -> None:
    called(x)


def evaluates(model: Model, called: nn.Module, x: torch.Tensor) -> None:
    with torch.no_grad():
        called(x)


STEPS: list[Step] = [
    dies_in_backward, dies_in_forward, stops_early, stops_early_and_drops_it, has_no_backward, evaluates
]  # fmt: skip


# ------------------------------------------------------------------ by what
def by_fsdp(model: Model, door: str = "FSDP", **options: Any) -> tuple[nn.Module, Any]:
    blocks = [f"blocks.{k}" for k in range(len(model.blocks))]
    sharded = through(door, model, *blocks, **options)
    return sharded, torch.optim.SGD(sharded.parameters(), lr=0.1)


def by_offloaded_fsdp(model: Model) -> tuple[nn.Module, Any]:
    return by_fsdp(model, offload=OffloadPolicy(parameters=True))


def in_place(model: Model) -> tuple[nn.Module, Any]:
    return by_fsdp(model, "fully_shard")


def by_sharded_ddp(model: Model) -> tuple[nn.Module, Any]:
    optimizer = OSS(model.parameters(), torch.optim.SGD, lr=0.1)
    return ShardedDDP(model, optimizer, reduce=ReducePolicy(bucket_numel=40)), optimizer


def _weights(model: Model, called: nn.Module) -> dict[str, torch.Tensor]:
    if isinstance(called, ShardedDDP):
        return model.state_dict()
    return called.state_dict()


def _train(rank: int, wrap: Callable[[Model], tuple[nn.Module, Any]], odd: Step) -> dict[str, torch.Tensor]:
    model = Model()
    called, optimizer = wrap(model)
    for step in range(5):
        x = batch(rank, step, 4, 5)
        optimizer.zero_grad()
        if step % 2:
            odd(model, called, x)
            optimizer.zero_grad()
            called.zero_grad()
        else:
            called(x).square().mean().backward()
            optimizer.step()
    weights = {name: value.clone() for name, value in _weights(model, called).items()}
    device = current_device()
    assert device is not None
    assert device.unwaited() == []
    called(batch(rank, 0, 4, 5))
    del model, called, optimizer
    gc.collect()
    assert device.unwaited() == []
    return weights


def _alone(ranks: int) -> dict[str, torch.Tensor]:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(0, 5, 2):
        optimizer.zero_grad()
        for rank in range(ranks):
            (model(batch(rank, step, 4, 5)).square().mean() / ranks).backward()
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize("odd", STEPS)
@pytest.mark.parametrize("wrap", [by_fsdp, by_offloaded_fsdp, in_place, by_sharded_ddp])
def test_steps_that_end_otherwise(wrap: Callable[[Model], tuple[nn.Module, Any]], odd: Step) -> None:
    for found in shardkit.launch(_train, WORLD_SIZE, backend="streams", args=(wrap, odd), timeout=30):
        torch.testing.assert_close(found, _alone(WORLD_SIZE))


def _gives_up(rank: int, wrap: Callable[[Model], tuple[nn.Module, Any]]) -> None:
    """The object goes while collectives are in flight, and another one is trained."""
    for _ in range(2):
        model = Model()
        called, _ = wrap(model)
        called(batch(rank, 0, 4, 5)).square().mean().backward()
        dies_in_backward(model, called, batch(rank, 1, 4, 5))
        del model, called
        gc.collect()


@pytest.mark.parametrize("wrap", [by_fsdp, in_place, by_sharded_ddp])
def test_models_that_are_given_up(wrap: Callable[[Model], tuple[nn.Module, Any]]) -> None:
    shardkit.launch(_gives_up, WORLD_SIZE, backend="streams", args=(wrap,), timeout=30)


def _saves_after_a_death(rank: int) -> None:
    model = Model()
    called, _ = by_fsdp(model)
    before = {name: value.clone() for name, value in called.state_dict().items()}
    dies_in_backward(model, called, batch(rank, 0, 4, 5))
    torch.testing.assert_close(dict(called.state_dict()), before)
    dies_in_forward(model, called, batch(rank, 0, 4, 5))
    with sharding_of(called).summon_full_params():
        for name, value in model.named_parameters():
            torch.testing.assert_close(
                value.detach(), before[name.replace("_fsdp_wrapped_module._fpw_module.", "")]
            )


def test_a_checkpoint_after_a_death() -> None:
    shardkit.launch(_saves_after_a_death, WORLD_SIZE, backend="streams", timeout=30)
