"""Every collective of a step's program depends on all before it, so that no scheduler can swap two on some ranks."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
import torch
from torch import nn

import shardkit
from shardkit.backend import get_backend
from shardkit.errors import OutOfStepError
from shardkit.fsdp import hybrid_groups
from tests.benchmarks.xla_trainers import collectives_of_a_tpu
from tests.pools import on_ranks, rank_pool
from tests.xla.hlo_graphs import Program

pytest.importorskip("torch_xla")
pytestmark = pytest.mark.xla

THEIRS, FSDP, SHARDED_DDP, OSS = "torch_xla's FSDP", "FSDP", "ShardedDDP", "OSS"
KEPT = " that keeps parameters"
KINDS = (FSDP, FSDP + KEPT, "hybrid", "shardkit.xla", SHARDED_DDP, OSS, "clipped")


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = (
        nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8), nn.BatchNorm1d(8)) for _ in range(3)
    )
    return nn.Sequential(*blocks).to(get_backend("xla").device())


def _trainer(kind: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, options = _model(), {"lr": 0.1, "momentum": 0.9}
    if kind in (SHARDED_DDP, OSS):
        oss = shardkit.OSS(model.parameters(), torch.optim.SGD, **options)
        return (model if kind == OSS else shardkit.ShardedDDP(model, oss)), oss
    keeps = kind.endswith(KEPT)
    wrap: Any = functools.partial(shardkit.FSDP, reshard=shardkit.ReshardPolicy(after_forward=not keeps))
    if kind == "hybrid":
        shards, replicas = hybrid_groups(2, backend="xla")
        wrap = functools.partial(shardkit.FSDP, group=shards, replicas=replicas)
    elif kind == "shardkit.xla":
        from shardkit.xla.fsdp import XlaFullyShardedDataParallel as Ours

        wrap = functools.partial(Ours, flatten_parameters=True)
    elif kind.startswith(THEIRS):
        from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel as Theirs

        wrap = functools.partial(
            Theirs, flatten_parameters=True, reshard_after_forward=not keeps, execute_sharding_on_init=False,
            pin_layout_in_collective_ops=False,
        )  # fmt: skip
    whole = wrap(nn.Sequential(*(wrap(block) for block in model)))
    return whole, torch.optim.SGD(whole.parameters(), **options)


def _steps(rank: int, kind: str) -> list[tuple[Program, float, int]]:
    """The programs of three steps with the collectives of a TPU, their losses, and programs compiled so far."""
    from shardkit.backends.xla import metrics
    from tests.xla import pending_program

    backend, found = get_backend("xla"), []
    with collectives_of_a_tpu() as prepare_sync:
        model, optimizer = _trainer(kind)
        x = (torch.arange(32.0).view(4, 8) / 32 + rank).to(backend.device())  # data: programs are the same
        for _ in range(3):
            prepare_sync()
            backend.mark_step(wait=True)
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            if kind == "clipped":
                model.clip_grad_norm_(0.1)
            optimizer.step()
            state = [*model.parameters(), *model.buffers()]
            text = pending_program.hlo(
                [loss, *state, *(p.grad for p in model.parameters() if p.grad is not None)]
            )
            prepare_sync()
            backend.mark_step(wait=True)
            backend.group().all_gather_object(None)  # the counter is the process's
            found.append((Program(text), loss.item(), metrics.compiles()))
            backend.group().all_gather_object(None)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_every_pair_of_collectives_is_ordered(kind: str) -> None:
    results = rank_pool(4, "xla").run(_steps, kind)
    for first, second, third in results:
        assert [program.unordered() for program, *_ in (first, second, third)] == [[], [], []]
        # the momentum is new in the first step
        assert second[2] == third[2], "the third step compiled"
    expected = {OSS: 1, SHARDED_DDP: 2 + 2}  # and buffers of two dtypes
    assert len(results[0][-1][0].collectives) == expected.get(kind, len(results[0][-1][0].collectives))
    if kind not in (SHARDED_DDP, OSS):
        assert len(results[0][-1][0].collectives) >= 6


@pytest.mark.parametrize("kept", ["", KEPT])
def test_nothing_waits_for_more_than_with_torch_xla(kept: str) -> None:
    pool = rank_pool(4, "xla")
    for ours, theirs in zip(pool.run(_steps, FSDP + kept), pool.run(_steps, THEIRS + kept), strict=True):
        (mine, *_), (other, *_) = ours[-1], theirs[-1]
        assert other.unordered() == []
        assert [loss for _, loss, _ in ours] == pytest.approx([loss for _, loss, _ in theirs], rel=1e-5)
        assert len(mine.collectives) <= len(other.collectives)
        (collectives_wait, products_wait), limits = mine.waits("dot"), other.waits("dot")
        assert collectives_wait <= limits[0]
        if kept:  # else torch_xla's backward uses what its forward gathered, and so does not wait for what it gathers
            assert products_wait <= limits[1]


def _mixed(rank: int) -> tuple[list[tuple[str, str]], list[float]]:
    """Collectives of two groups and four kinds, of several dtypes, the first of which bring NaN and infinity."""
    from tests.xla import pending_program

    with collectives_of_a_tpu() as prepare_sync:
        device = get_backend("xla").device()
        everybody, pair = get_backend("xla").group(), hybrid_groups(2, backend="xla")[0]
        bad = torch.tensor([float("nan"), float("inf")], device=device)
        two, eight = torch.empty(4, device=device), torch.empty(8, device=device)
        pair.all_gather_into(two, bad)
        everybody.all_gather_into(eight, bad.to(torch.float32))
        whole = torch.full((8,), 1 + rank).to(device)  # data: programs are the same
        pair.all_reduce(whole)
        part = torch.zeros(2, device=device, dtype=torch.bfloat16)
        everybody.reduce_scatter_into(part, whole.to(torch.bfloat16))
        sent, received = (torch.arange(4.0) + rank).to(device), torch.empty(4, device=device)
        everybody.all_to_all(received, sent)
        pair.broadcast(received, 1)
        values = torch.cat([two, eight, whole.float(), part.float(), received])
        unordered = Program(pending_program.hlo([values])).unordered()
        prepare_sync()
        get_backend("xla").mark_step(wait=True)
        return unordered, values[12:].tolist()


def test_order_holds_between_groups_and_nan_stays_where_it_is() -> None:
    for rank, (unordered, values) in enumerate(rank_pool(4, "xla").run(_mixed)):
        assert unordered == []
        first = rank // 2 * 2
        total, source = float(first + 1 + first + 2), first + 1
        assert values == [total] * 8 + [20.0] * 2 + [float(source + k) for k in range(4)]


@on_ranks((2, "xla"))
def test_the_order_ends_with_the_program(rank: int) -> None:
    """Collectives, and what the program takes in, after a sync and after a program was dropped."""
    from shardkit.backends.xla.runtime import NativeCollectives
    from tests.xla import pending_program

    ordered, found = NativeCollectives(), []
    value = torch.ones(4, device=get_backend("xla").device())
    get_backend("xla").mark_step(wait=True)
    for end in ("sync", "drop", "drop", "sync"):
        result = ordered.all_reduce(ordered.all_reduce(value, "sum", [[0], [1]]), "sum", [[0], [1]])
        program = Program(pending_program.hlo([result]))
        found.append((len(program.collectives), program.count("parameter")))
        if end == "drop":
            get_backend("xla").group().abort()
        else:
            get_backend("xla").mark_step(wait=True)
    assert {collectives for collectives, _ in found} == {2}
    assert len({inputs for _, inputs in found}) == 1


def _alike(kind: str) -> list[tuple[nn.Module, torch.optim.Optimizer]]:
    return [_trainer(kind) for _ in range(2)]


def _does(rank: int, what: str, kind: str) -> str:
    """What it came to if rank 1 alone does that; before, all ranks have done a step alike."""
    backend, here = get_backend("xla"), rank == 1
    x = torch.ones(4, 8).to(backend.device())
    trainers = _alike(kind)
    for step in range(2):
        swapped = step == 1 and here and what == "order"
        losses = [(model(x).square().mean(), model) for model, _ in trainers[:: -1 if swapped else 1]]
        for loss, model in losses:
            model.zero_grad()
            loss.backward()
        for _, optimizer in trainers:
            if step == 1 and here and what == "lr":
                optimizer.param_groups[0]["lr"] = 0.2
            if step == 1 and here and what == "cleared":
                optimizer.param_groups[0]["params"][0].grad = None
            if not (step == 1 and here and what == "step"):
                optimizer.step()
        try:
            backend.mark_step(wait=True)
        except OutOfStepError as error:
            return str(error)
    return ""


@pytest.mark.parametrize(
    ("what", "kind", "named"),
    [
        ("nothing", FSDP, ""), ("nothing", SHARDED_DDP, ""), ("nothing", OSS, ""),
        ("order", FSDP, r"'parameters 0 of 0, unit \d+'"),
        ("order", SHARDED_DDP, "agreement on the end of backward of Sequential"),
        ("lr", FSDP, "agreement on a step with other options than before: lr of group 0 0.2"),
        ("lr", OSS, "agreement on a step with other options than before: lr of group 0 0.2"),
        ("cleared", OSS, "agreement on a step with gradients: without those of parameters 0"),
        ("step", FSDP, "agreement on a step"),
        ("cleared", FSDP, "agreement on a step without the gradients of parameters 0 of"),
    ],
)  # fmt: skip
def test_what_one_rank_does_alone(what: str, kind: str, named: str) -> None:
    """Its program, or what is sent to whom, would be another one with the same shapes."""
    for end in rank_pool(2, "xla").run(_does, what, kind):
        assert bool(end) == bool(named)
        assert re.search(named, end), end
