"""OSS and ShardedDataParallel on XLA replicas: the single-process truth, one compile, the expected collectives."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from tests.beside import assert_same, mean_square
from tests.fsdp_models import build
from tests.pools import rank_pool
from tests.programs.running import check_against_truth
from tests.programs.written import PROGRAMS
from tests.sharded_ddp.test_sharded_ddp import mlp

pytest.importorskip("torch_xla")
pytestmark = pytest.mark.xla


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name", PROGRAMS)
def test_written_programs(name: str, world_size: int) -> None:
    check_against_truth(PROGRAMS[name], world_size, backend="xla")


# ------------------------------------------------------------------ compiles and collectives
def _count(rank: int, world_size: int) -> dict[str, Any]:
    from shardkit.backend import get_backend
    from shardkit.backends.xla import metrics
    from shardkit.nn.data_parallel import ShardedDataParallel
    from shardkit.optim.oss import OSS
    from tests.xla import pending_program

    backend = get_backend("xla")
    model = build(mlp)
    model.to(backend.device())
    optimizer = OSS(model.parameters(), torch.optim.AdamW, lr=0.01)
    wrapped = ShardedDataParallel(model, optimizer)
    backend.mark_step(wait=True)
    compiles, seen = [], {}
    for step in range(7):
        optimizer.zero_grad()
        mean_square(wrapped, rank, step).backward()
        optimizer.step()
        if step == 6:  # asking for the program is work of its own: after the last count
            seen = dict(
                pending_program.collectives(
                    [*model.parameters(), *(s.own for s in optimizer.placement.segments)]
                )
            )
            break
        backend.mark_step(wait=True)
        backend.group().barrier()
        compiles.append(metrics.compiles())
        backend.group().barrier()
    return {"compiles": compiles, "collectives": seen}


def test_four_replicas_compile_once() -> None:
    for replica in rank_pool(4, "xla").run(_count, 4):
        compiles = replica["compiles"]
        # the first step makes optimizer state, the second is the steady state
        assert compiles[-1] == compiles[1], f"compiles after each step: {compiles}"
        assert replica["collectives"] == {"reduce-scatter": 1, "all-gather": 1}


# ------------------------------------------------------------------ state
def _state(rank: int, world_size: int, saved: dict[str, Any] | None) -> Any:
    from shardkit.backend import get_backend
    from shardkit.optim.oss import OSS

    backend = get_backend("xla")
    model = build(mlp)
    truth = copy.deepcopy(model)
    plain = torch.optim.Adam(truth.parameters(), lr=0.01)
    model.to(backend.device())
    optimizer = OSS(model.parameters(), torch.optim.Adam, lr=0.01)
    if saved is not None:
        optimizer.load_state_dict(saved)
        plain.load_state_dict(copy.deepcopy(saved))
    for step in range(2):
        for m, o in ((truth, plain), (model, optimizer)):
            o.zero_grad()
            for r in range(world_size):
                (mean_square(m, r, step) / world_size).backward()
            o.step()
        backend.mark_step()
        assert_same(model, truth, f"rank {rank} step {step}")
    whole = optimizer.state_dict(all_ranks=True)
    torch.testing.assert_close(whole["state"], plain.state_dict()["state"], rtol=1e-4, atol=1e-6)
    return whole


def test_state_is_that_of_a_plain_optimizer_and_loads() -> None:
    saved = rank_pool(2, "xla").run(_state, 2, None)[0]
    rank_pool(4, "xla").run(_state, 4, saved)
