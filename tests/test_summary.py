"""What a summary says of a sharded model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import shardkit
from shardkit.errors import ConfigurationError
from shardkit.tracing.tables import counted, in_bytes, plain_table
from tests.pools import on_ranks, rank_pool


def _model(width: int = 8) -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(3)])


def _units(rank: int) -> tuple[Any, str]:
    model = _model()
    model[0] = shardkit.FSDP(model[0], precision=shardkit.PrecisionPolicy(compute=torch.bfloat16))
    model[1] = shardkit.FSDP(model[1], offload=shardkit.OffloadPolicy(parameters=True))
    whole = shardkit.FSDP(model)
    found = shardkit.summary(whole)
    return found.units, str(found)


@on_ranks((2, "simulated"))
def test_a_fixed_order_of_sums(rank: int) -> None:
    policy = shardkit.ReducePolicy(order="fixed", microbatches=4)
    owned = _model()
    oss = shardkit.OSS(owned.parameters(), torch.optim.SGD, lr=0.1)
    models = (shardkit.FSDP(_model(), reduce=policy), shardkit.ShardedDDP(owned, oss, reduce=policy))
    for model in models:
        first = str(shardkit.summary(model)).partition("\n")[0]
        assert first.endswith("sums over 4 micro-batches in a fixed order")


def test_units() -> None:
    (root, first, second), text = rank_pool(3, "simulated").run(_units)[0]
    assert (root.name, root.kind, root.parameters, root.stays) == (
        "(the root)",
        "Sequential",
        72,
        "to backward",
    )
    assert (first.name, first.dtype, first.shard, first.gathered) == (
        "0",
        "float32 -> bfloat16",
        4 * 24,
        2 * 72,
    )
    assert (second.name, second.on_host, second.padding, second.stays) == (
        "1",
        "parameters and gradients",
        0.0,
        "",
    )
    assert "Sequential in 3 units on 3 ranks (this is 0)" in text
    assert "216" in text.splitlines()[-2]
    assert text.splitlines()[-1].startswith("! 0, 1: gathers less than 1 MiB")


@on_ranks((2, "simulated"))
def test_units_in_place(rank: int) -> None:
    model = _model()
    shardkit.fully_shard(model[0], reshard=shardkit.ReshardPolicy(after_forward=False))
    shardkit.fully_shard(model)
    found = shardkit.summary(model)
    (root, first), (alone,) = found.units, shardkit.summary(model[0]).units
    assert not any(u.cuts_rows for u in found.units)
    short = shardkit.fully_shard(nn.Sequential(nn.Linear(512, 3, bias=False), nn.Linear(3, 5)))
    (unit,) = shardkit.summary(short).units
    assert unit.cuts_rows
    assert 0 < unit.padding < 0.01
    assert f"{100 * unit.padding:.1f} %" in str(shardkit.summary(short))
    assert "rows are cut" not in str(shardkit.summary(short))  # so few elements are nothing to warn of
    long = shardkit.fully_shard(nn.Linear(2**17, 3, bias=False))
    assert "! (the root): rows are cut between ranks" in str(shardkit.summary(long))
    assert (root.parameters, root.shard) == (144, 4 * 72)
    assert (first.name, first.stays) == ("0", "to backward")
    assert alone.parameters == 72


@on_ranks((2, "simulated"))
def test_owners(rank: int) -> None:
    model = _model()
    optimizer = shardkit.OSS(model.parameters(), torch.optim.SGD, lr=0.1)
    units = shardkit.summary(shardkit.ShardedDDP(model, optimizer)).units
    assert [u.name for u in units] == ["optimizer 0, rank 0 owns", "optimizer 0, rank 1 owns"]
    assert sum(u.parameters for u in units) == 216


@on_ranks((2, "simulated"))
def test_units_that_are_too_large_are_named(rank: int) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4096, 4096), shardkit.FSDP(nn.Linear(4096, 100)))
        (warning,) = shardkit.summary(shardkit.FSDP(model)).warnings
        assert "(the root) has 98 % of the parameters" in warning
        assert "Make its blocks units" in warning


def test_alone_and_not_at_all() -> None:
    def alone(rank: int) -> Any:
        return shardkit.summary(shardkit.FSDP(_model()))

    found = rank_pool(1, "simulated").run(alone)[0]
    assert found.units[0].stays == "always"
    with pytest.raises(ConfigurationError, match="nothing of this Sequential is sharded"):
        shardkit.summary(_model())
    assert "(the root)" in str(found)


def test_tables() -> None:
    assert [counted(n, "rank") for n in (0, 1, 1000)] == ["0 ranks", "1 rank", "1,000 ranks"]
    assert [in_bytes(n) for n in (0, 999, 2**10, 1500, 2**20, 123.4 * 2**20, 5 * 2**40)] == [
        "0 B", "999 B", "1 KiB", "1.46 KiB", "1 MiB", "123 MiB", "5 TiB"
    ]  # fmt: skip
    table = plain_table(("a", "b", "c"), [("1", "", "x"), ("10", "", "y")], right=(0,))
    assert table.splitlines() == [" a  c", "-----", " 1  x", "10  y"]
