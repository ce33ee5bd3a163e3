"""OSS and ShardedDataParallel on XLA replicas: the single-process truth, one compile, the expected collectives."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch

from tests.beside import assert_same
from tests.pools import rank_pool
from tests.scenarios import batch_for, compare, seeded, square_loss
from tests.sharded_ddp import test_sharded_ddp as cases

pytest.importorskip("torch_xla")
pytestmark = pytest.mark.xla

SGD: dict[str, Any] = {"optim": torch.optim.SGD, "options": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.3}}


def run(world_size: int, build: Any, scenario: Any, **options: Any) -> None:
    rank_pool(world_size, "xla").run(_compare, world_size, build, scenario, options)


def _compare(rank: int, world_size: int, build: Any, scenario: Any, options: dict[str, Any]) -> None:
    compare(rank, world_size, build, scenario, backend="xla", **options)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize(
    "scenario",
    [
        cases.plain_steps,
        cases.accumulate_without_no_sync,
        cases.accumulate_with_no_sync,
        cases.two_forwards,
        cases.BackwardTwice(),
        cases.clipping,
        cases.discard_a_backward,
    ],
    ids=["steps", "accumulate", "no_sync", "two forwards", "backward twice", "clip", "discard"],
)
def test_steps_equal_one_process(world_size: int, scenario: Any) -> None:
    run(world_size, cases.mlp, scenario)


FORMS = list(itertools.product(["optimizer", "wrapper", "module"], [True, False]))


@pytest.mark.parametrize(("form", "set_to_none"), FORMS)
def test_zero_grad_in_every_form(form: str, set_to_none: bool) -> None:
    run(2, cases.mlp, cases.ZeroGrad(form, set_to_none))


def test_changing_structure_and_unused_parameters() -> None:
    run(2, cases.mlp, cases.freeze_and_unfreeze, **SGD)
    run(2, cases.TwoPart, cases.add_group, groups=cases.trunk_only)
    run(2, cases.Branches, cases.rank_dependent_branches, **SGD)
    run(2, cases.Tied, cases.plain_steps, **SGD)  # AdamW would blow up rounding in rows that are not used


def test_optimizers_that_need_whole_parameters() -> None:
    run(2, cases.mlp, cases.plain_steps, optim=torch.optim.Adafactor, options={"lr": 0.01})


# ------------------------------------------------------------------ compiles and collectives
def _count(rank: int, world_size: int) -> dict[str, Any]:
    from shardkit.backend import get_backend
    from shardkit.backends.xla import metrics
    from shardkit.nn.data_parallel import ShardedDataParallel
    from shardkit.optim.oss import OSS

    backend = get_backend("xla")
    model = cases.mlp()
    seeded(model)
    model.to(backend.device())
    optimizer = OSS(model.parameters(), torch.optim.AdamW, lr=0.01)
    wrapped = ShardedDataParallel(model, optimizer)
    backend.mark_step(wait=True)
    losses, compiles, seen = [], [], {}
    for step in range(7):
        optimizer.zero_grad()
        loss = square_loss(step)(wrapped, rank)
        loss.backward()
        optimizer.step()
        if step == 6:  # asking for the program is work of its own: after the last count
            seen = dict(metrics.collectives([*model.parameters(), *(s.own for s in optimizer.segments())]))
            break
        backend.mark_step(wait=True)
        backend.group().barrier()
        compiles.append(metrics.compiles())
        backend.group().barrier()
        losses.append(loss.detach())
    return {"losses": [x.item() for x in losses], "compiles": compiles, "collectives": seen}


def _gloo_losses(rank: int) -> list[float]:
    from shardkit.nn.data_parallel import ShardedDataParallel
    from shardkit.optim.oss import OSS

    model = cases.mlp()
    seeded(model)
    optimizer = OSS(model.parameters(), torch.optim.AdamW, lr=0.01)
    wrapped = ShardedDataParallel(model, optimizer)
    losses = []
    for step in range(6):
        optimizer.zero_grad()
        loss = square_loss(step)(wrapped, rank)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_four_replicas_compile_once_and_equal_gloo() -> None:
    replicas = rank_pool(4, "xla").run(_count, 4)
    gloo = rank_pool(4, "gloo").run(_gloo_losses)
    for replica, losses in zip(replicas, gloo, strict=True):
        assert replica["losses"] == pytest.approx(losses, rel=1e-6)
        compiles = replica["compiles"]
        # the first step makes optimizer state, the second is the steady state
        assert compiles[-1] == compiles[1], f"compiles after each step: {compiles}"
        assert replica["collectives"] == {"reduce-scatter": 1, "all-gather": 1}


# ------------------------------------------------------------------ state
def _state(rank: int, world_size: int, saved: dict[str, Any] | None) -> Any:
    from shardkit.backend import get_backend
    from shardkit.optim.oss import OSS

    backend = get_backend("xla")
    model = cases.mlp()
    seeded(model)
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
                (m(batch_for(m, r, step)).pow(2).mean() / world_size).backward()
            o.step()
        backend.mark_step()
        assert_same(model, truth, f"rank {rank} step {step}")
    whole = optimizer.state_dict(all_ranks=True)
    torch.testing.assert_close(whole["state"], plain.state_dict()["state"], rtol=1e-4, atol=1e-6)
    return whole


def test_state_is_that_of_a_plain_optimizer_and_loads() -> None:
    saved = rank_pool(2, "xla").run(_state, 2, None)[0]
    rank_pool(4, "xla").run(_state, 4, saved)
