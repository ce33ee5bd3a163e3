"""What a step costs on XLA, where it does not depend on the machine: programs compiled, collectives, Python calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import shardkit
from tests.benchmarks import xla_training
from tests.benchmarks.xla_trainers import FSDP, NATIVE, SHARDED_DDP, UNSYNCED, XLA_FSDP
from tests.pools import rank_pool

pytest.importorskip("torch_xla")
pytestmark = [pytest.mark.xla, pytest.mark.timeout(300)]


TRAINERS = (NATIVE, SHARDED_DDP, UNSYNCED, FSDP, XLA_FSDP)


def test_programs_collectives_and_calls_beside_native_training() -> None:
    for result in rank_pool(2, "xla").run(xla_training.train, "mnist", TRAINERS, 0, 0):
        facts = result["facts"]
        for name in TRAINERS:
            # batch norms' statistics are rank 0's or each rank's own; training does not look at them
            assert facts[name]["losses"] == pytest.approx(facts[NATIVE]["losses"], rel=1e-5), name
        # the first step makes the momentum, the second is the steady state
        for name in (NATIVE, SHARDED_DDP, UNSYNCED, FSDP):
            assert facts[name]["compiles"] == 2, name
        collectives = {name: fact["collectives"] for name, fact in facts.items()}
        assert collectives[NATIVE] == {"all-reduce": 1}
        assert collectives[UNSYNCED] == {"reduce-scatter": 1, "all-gather": 1}
        # and buffers, of two dtypes
        assert collectives[SHARDED_DDP] == {"reduce-scatter": 1, "all-gather": 1, "all-reduce": 2}
        theirs = collectives[XLA_FSDP]
        assert all(count <= theirs[kind] for kind, count in collectives[FSDP].items())
        assert facts[SHARDED_DDP]["calls"] < facts[NATIVE]["calls"]
        assert facts[FSDP]["calls"] < facts[XLA_FSDP]["calls"]
        assert facts[UNSYNCED]["operations"] <= facts[NATIVE]["operations"]


def _aliased(rank: int, name: str) -> tuple[int, int]:
    import torch_xla

    from shardkit.backends.xla.metrics import aliased

    torch.manual_seed(0)
    layers = (nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 16), nn.Linear(16, 2))
    model: nn.Module = nn.Sequential(*layers).to(torch_xla.device())
    shapes = [t.shape for t in (*model.parameters(), *model.buffers())]
    options = {"lr": 0.1, "momentum": 0.9}
    if name == "ShardedDDP":
        optimizer: Any = shardkit.OSS(model.parameters(), torch.optim.SGD, **options)
        model = shardkit.ShardedDDP(model, optimizer)
    else:
        model = shardkit.FSDP(model) if name == "FSDP" else model
        optimizer = torch.optim.SGD(model.parameters(), **options)
    inputs = torch.ones(4, 16, device=torch_xla.device()) * (rank + 1)
    for _ in range(2):
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
        torch_xla.sync(wait=True)
    return aliased(), len(shapes)


@pytest.mark.parametrize("name", ["native", "ShardedDDP", "FSDP"])
def test_a_step_writes_over_what_it_replaces(name: str) -> None:
    found, tensors = rank_pool(2, "xla").run(_aliased, name)[0]
    params = tensors - 3
    expected = {
        "native": tensors + params,  # with a momentum each
        "ShardedDDP": tensors + 2,  # a segment and its momentum
        "FSDP": 3 + 3,  # a shard, its gradient and its momentum
    }
    assert found == expected[name]
