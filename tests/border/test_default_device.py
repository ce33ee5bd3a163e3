"""What is done while torch.set_default_device names another device than the model's, as scripts for one GPU do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardkit
from shardkit import FSDP, OSS, Compression, OffloadPolicy, PrecisionPolicy, ShardedDDP
from shardkit.optim import AdaScale
from shardkit.training.whole_parameters import WholeParameters
from tests.beside import assert_same
from tests.doors import linears, through
from tests.pools import on_ranks

SGD = torch.optim.SGD
OPTIONS = {"lr": 0.1, "momentum": 0.9}


def _sharded_ddp(model: nn.Module, scales: bool = False) -> tuple[nn.Module, Any]:
    oss = OSS(model.parameters(), SGD, **OPTIONS)
    return ShardedDDP(model, oss), AdaScale(oss) if scales else oss


def _in_place(model: nn.Module, door: str) -> tuple[nn.Module, Any]:
    return through(door, model, "0", "1", "2"), SGD(model.parameters(), **OPTIONS)


def _wrapped(model: nn.Module, **options: Any) -> tuple[nn.Module, Any]:
    wrapped = FSDP(model, **options)
    return wrapped, SGD(wrapped.parameters(), **OPTIONS)


def _whole(model: nn.Module) -> tuple[nn.Module, Any]:
    wrapped = FSDP(model)
    return wrapped, WholeParameters(wrapped, SGD, **OPTIONS)


DOORS: dict[str, Callable[[nn.Module], tuple[nn.Module, Any]]] = {
    "FSDP": _wrapped,
    "offloaded": lambda m: _wrapped(m, offload=OffloadPolicy(parameters=True)),
    "compressed": lambda m: _wrapped(m, precision=PrecisionPolicy(compression=Compression())),
    "fully_shard": lambda m: _in_place(m, "fully_shard"),
    "dtensors": lambda m: _in_place(m, "dtensors"),
    "ShardedDDP": _sharded_ddp,
    "AdaScale": lambda m: _sharded_ddp(m, scales=True),
    "WholeParameters": _whole,
}


def _model() -> nn.Sequential:
    with torch.device("cpu"):
        return linears(6, 7, 3)


@pytest.mark.parametrize("door", DOORS)
@on_ranks(2)
def test_training_and_checkpoints(rank: int, door: str, tmp_path: Path) -> None:
    def steps(model: nn.Module, optimizer: Any, ranks: range) -> None:
        for _ in range(2):
            for r in ranks:
                x = torch.linspace(-1, 1 + r, 30, device="cpu").view(5, 6)
                (model(x).square().mean() / len(ranks)).backward()
            optimizer.step()
            optimizer.zero_grad()

    plain = _model()
    torch.set_default_device("meta")  # whoever asks it for memory gets none
    try:
        model, optimizer = DOORS[door](_model())
        steps(model, optimizer, range(rank, rank + 1))
        if door != "AdaScale":
            shardkit.save(tmp_path, step=1, model=model, optimizer=optimizer)
            before = copy.deepcopy(model.state_dict())
            steps(model, optimizer, range(rank, rank + 1))
            shardkit.restore(tmp_path, model=model, optimizer=optimizer)
            for name, value in model.state_dict().items():
                torch.testing.assert_close(value, before[name], rtol=0, atol=0)
        steps(plain, SGD(plain.parameters(), **OPTIONS), range(2))  # type: ignore[arg-type]
        if door not in ("AdaScale", "compressed"):
            assert_same(model, plain, door)
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize("door", ["FSDP", "fully_shard", "dtensors"])
@on_ranks(2)
def test_optimizers_go_on(rank: int, door: str, tmp_path: Path) -> None:
    """What a checkpoint gives an optimizer to count with is where the optimizer can read it."""
    model, _ = DOORS[door](_model())
    optimizer, x = torch.optim.Adam(model.parameters()), torch.linspace(-1, 1 + rank, 30).view(5, 6)
    values = []
    for step in range(4):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.device("meta"):
            if step == 1:
                shardkit.save(tmp_path, step=step, model=model, optimizer=optimizer)
            elif step == 2:
                values.append(copy.deepcopy(model.state_dict()))
                shardkit.restore(tmp_path, model=model, optimizer=optimizer)
    torch.testing.assert_close(dict(model.state_dict()), dict(values[0]), rtol=0, atol=0)
