"""Ranks with different numbers of micro-batches (``shardkit.uneven``), beside one process over all of them."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import logging
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardkit
from shardkit import ConfigurationError, LifecycleError, ShardedDDP, fully_shard, hybrid_groups, sharding_of
from shardkit.errors import OutOfStepError, RankFailedError
from shardkit.torch_fsdp2 import fully_shard as torch_words
from tests.beside import assert_same
from tests.border.strategies import heard
from tests.doors import DOORS, through
from tests.figures.counters import OperationCounter
from tests.pools import DEVICE, on_ranks, rank_pool, run_once

WIDTH = 13


class Net(nn.Module):
    """Blocks of different sizes, one computed anew in backward, a tied weight, something frozen."""

    units = ("blocks.0", "blocks.1", "blocks.2")

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        sizes = (WIDTH, 40, 3, WIDTH)
        self.blocks = nn.ModuleList([nn.Linear(a, b) for a, b in itertools.pairwise(sizes)])
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for k, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=False) if k == 1 else block(x)
            x = torch.tanh(x)
        out: torch.Tensor = self.head(x + self.frozen(x)) @ self.head.weight
        return out


class Twice(Net):
    """Calls a unit twice, each time inside of a re-entrant checkpoint."""

    units = (*Net.units, "frozen", "again")

    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(WIDTH, WIDTH).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        for _ in range(2):
            x = torch.tanh(checkpoint(self.again, x, use_reentrant=True))
        return x


def _loss(model: nn.Module, seed: int, *others: Any, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return model(torch.randn(3, WIDTH, generator=generator, dtype=dtype), *others).square().mean()


def _sharded(way: str, make: Callable[[], Any] = Net) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = make()
    if way == "ShardedDDP":
        optimizer = shardkit.OSS(
            [p for p in model.parameters() if p.requires_grad], torch.optim.AdamW, lr=1e-2
        )
        return ShardedDDP(model, optimizer), optimizer
    options: dict[str, Any] = {}
    if way == "hybrid":
        options["group"], options["replicas"] = hybrid_groups(2)
    model = through("FSDP" if way == "hybrid" else way, model, *model.units, **options)
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def _evaluate(
    model: nn.Module,
    plain: nn.Module,
    times: int,
    seed: int = 0,
    loss: Callable[[nn.Module, int], torch.Tensor] = _loss,
) -> None:
    for k in range(seed, seed + times):
        with torch.inference_mode() if k % 2 else torch.no_grad():
            torch.testing.assert_close(loss(model, k), loss(plain, k), rtol=1e-12, atol=1e-12)


def _train(rank: int, way: str, counts: list[list[int]], meeting: str, weighted: bool) -> list[str]:
    with heard(logging.WARNING) as lines:
        _compare(rank, way, counts, meeting, weighted)
        return [line for line in lines if "trainable parameters changed" not in line]


def _compare(
    rank: int, way: str, counts: list[list[int]], meeting: str, weighted: bool,
    make: Callable[[], nn.Module] = Net, loss_of: Callable[[nn.Module, int], torch.Tensor] = _loss,
) -> None:  # fmt: skip
    plain = make()
    truth = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=1e-2)
    model, optimizer = _sharded(way, make)
    evaluations = random.Random(rank)  # whose numbers differ, too
    for step, per_rank in enumerate(counts):
        inner: Any = model.module if way == "ShardedDDP" else model
        freezes = make is Net and way in ("ShardedDDP", "fully_shard", "dtensors")
        for m in (plain, inner) if freezes else ():
            m.get_parameter("blocks.0.weight").requires_grad_(step % 2 == 0)  # some run nothing from then on
        with shardkit.uneven(model, once=meeting == "once") as work:
            inside: Any = sharding_of(model).no_sync() if way != "ShardedDDP" else model.no_sync()
            with inside if meeting == "no_sync" else contextlib.nullcontext():
                for k in range(per_rank[rank]):
                    seed = 1000 * step + 10 * k + rank
                    _evaluate(model, plain, evaluations.choice((0, 0, 1, 2)), seed + 500, loss_of)
                    if k == 1 and make is Net:  # of inputs alone, and no micro-batch
                        attacked = torch.ones(3, WIDTH, dtype=torch.float64, requires_grad=True)
                        torch.autograd.grad(model(attacked).sum(), attacked)
                    loss = loss_of(model, seed)
                    if k == 1 and make is Net:  # of another graph
                        torch.autograd.grad(attacked.sin().sum(), attacked)
                    (work.weighted(loss, 1 + k) if weighted else loss).backward()
                _evaluate(model, plain, evaluations.choice((0, 1)), 500, loss_of)
        total = sum(1 + k if weighted else 1 for n in per_rank for k in range(n))
        for r, n in enumerate(per_rank):
            for k in range(n):
                ((1 + k if weighted else 1) / total * loss_of(plain, 1000 * step + 10 * k + r)).backward()
        if way != "ShardedDDP":
            norm = sharding_of(model).clip_grad_norm_(1e9)
            expected = nn.utils.clip_grad_norm_(plain.parameters(), 1e9)
            assert float(norm) == pytest.approx(float(expected), rel=1e-12)
        for each in (optimizer, truth):
            each.step()
            each.zero_grad()
    assert_same(model, plain, rtol=1e-12, atol=1e-12)


def _counts(world_size: int, seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    drawn = [[draw.choice((0, 0, 1, 2, 5)) for _ in range(world_size)] for _ in range(4)]
    return [*drawn, [0] * world_size, [1] * world_size, [2, *[0] * (world_size - 1)]]


WAYS = [(way, "simulated") for way in ("FSDP", "fully_shard", "ShardedDDP")]
WAYS.append(("dtensors", "gloo"))


@pytest.mark.parametrize(("way", "backend"), WAYS)
def test_any_number_of_micro_batches_is_one_process(way: str, backend: str) -> None:
    for world_size in (2, 3):
        pool = rank_pool(world_size, backend if world_size == 3 else "gloo")
        assert not any(
            pool.run(_train, way, [[0, *[2] * (world_size - 1)], *_counts(world_size, 1)], "each", True)
        )
        meeting = "no_sync" if world_size == 2 else "once"
        assert not any(pool.run(_train, way, _counts(world_size, world_size), meeting, world_size == 3))
    rank_pool(1).run(_train, way, [[2], [0], [1]], "each", True) if way == "FSDP" else None
    rank_pool(3, backend).run(_compare, way, [[0, 1, 2], [2, 0, 1], [1, 0, 0]], "each", True, Twice)


def test_replicas_have_different_numbers_too() -> None:
    for meeting in ("each", "once"):
        rank_pool(4).run(_train, "hybrid", [[0, 0, 2, 1], *_counts(4, 5)], meeting, False)


def _drawn_steps(rank: int, seed: int) -> None:
    """Short programs: another way, other numbers, weights and kinds of accumulation each time."""
    draw = random.Random(seed)
    world_size = 2 + seed % 7
    for way in draw.sample(["FSDP", "fully_shard", "ShardedDDP"], 2):
        counts = [[draw.choice((0, 0, 1, 1, 2, 5)) for _ in range(world_size)] for _ in range(3)]
        _compare(rank, way, counts, draw.choice(("each", "no_sync", "once")), draw.random() < 0.5)


def test_drawn_steps_on_simulated_ranks() -> None:
    for seed in range(7):
        rank_pool(2 + seed % 7, "simulated").run(_drawn_steps, seed)


def _scaled(rank: int, way: str) -> None:
    """A loss scale, clipping, an overflow on one rank; an optimizer that needs whole matrices, or replicas."""
    plain, kind, options = Net().float(), torch.optim.Adafactor, dict[str, Any]()
    optimizer: Any
    if way == "hybrid":
        options["group"], options["replicas"] = hybrid_groups(2)
        kind = torch.optim.AdamW  # type: ignore[assignment]
    model = Net().float()
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    make = (
        shardkit.WholeParameters if way == "whole" else lambda m, kind, **given: kind(m.parameters(), **given)
    )
    optimizer = make(model, kind, lr=0.05)
    truth = kind([p for p in plain.parameters() if p.requires_grad], lr=0.05)
    scaler = shardkit.ShardedGradScaler(init_scale=8.0)
    for step, per_rank in enumerate([[1, 2, 1, 0], [0, 2, 0, 1], [3, 0, 0, 0], [0, 1, 2, 0]]):
        overflows = step == 2
        with shardkit.uneven(model, once=step == 1):
            for k in range(per_rank[rank]):
                loss = _loss(model, 100 * step + 10 * k + rank, dtype=torch.float32)
                scaler.scale(loss * math.inf if overflows and k else loss).backward()
        numbers = per_rank[: 4 if way == "hybrid" else 2]
        for r, n in enumerate(numbers):
            for k in range(n):
                (_loss(plain, 100 * step + 10 * k + r, dtype=torch.float32) / sum(numbers)).backward()
        scaler.scale(torch.zeros(())) if step == 0 else None
        scaler.unscale_(optimizer)
        sharding_of(model).clip_grad_norm_(0.5)
        nn.utils.clip_grad_norm_([p for p in plain.parameters() if p.requires_grad], 0.5)
        scaler.step(optimizer)
        scaler.update()
        truth.step() if not overflows else None
        model.zero_grad()
        plain.zero_grad()
    assert scaler.get_scale() == 4.0
    torch.testing.assert_close(
        dict(sharding_of(model).export()), dict(plain.state_dict()), rtol=1e-4, atol=1e-5
    )


def test_a_loss_scale_and_clipping() -> None:
    rank_pool(2).run(_scaled, "whole")
    rank_pool(4).run(_scaled, "hybrid")


def _costs(rank: int) -> tuple[list[float], list[int]]:
    model, _ = _sharded("FSDP")
    found, told = [], []
    for once in (False, False, True):
        with OperationCounter(2, least=0) as counter, shardkit.uneven(model, once=once):
            for k in range(2 * rank):
                _loss(model, k).backward()
        model.zero_grad()
        found.append(counter.sent)
        told.append(counter.collectives["allreduce_"])
    return found[1:], told


def test_a_rank_that_is_through_sends_what_others_send() -> None:
    ((idle, idle_once), told), ((busy, busy_once), also) = rank_pool(2).run(_costs)
    # what ranks tell each other, before each micro-batch and at the end; of frozen units there is none apart
    wanted = [0, 0, 0] if DEVICE["name"] == "streams" else [3, 3, 1]  # that device's messages are not counted
    assert told == also == wanted
    assert idle == pytest.approx(busy, abs=200)  # and some words on the control channel
    assert idle_once == busy_once <= 0.45 * busy  # one gather and one reduction in place of four and two


def _two_backwards(call: Any) -> None:
    out = call(torch.ones(1, WIDTH).double()).sum()
    out.backward(retain_graph=True)
    out.backward()


@on_ranks(2)
def test_what_is_refused(rank: int) -> None:
    model, _ = _sharded("FSDP")
    with pytest.raises(LifecycleError, match="1 calls of the model and 0 backwards"), shardkit.uneven(model):
        _loss(model, 0) + _loss(model, 0)
    for calls in (0, 1):  # of another method, and of the model
        model, _ = _sharded("FSDP")
        with pytest.raises(LifecycleError, match=f"{calls} calls of .* 2 backwards"), shardkit.uneven(model):
            _two_backwards(model if calls else model.forward)
    model, _ = _sharded("fully_shard")
    with pytest.raises(ConfigurationError, match="sharded as a whole"):
        shardkit.uneven(Net())
    _loss(model, 0).backward()
    with pytest.raises(LifecycleError, match="outermost"):
        shardkit.uneven(model.blocks[0])
    # gradients from before are added to
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    with shardkit.uneven(model):
        if rank:
            _loss(model, 0).backward()
    found = [p.grad for p in model.parameters() if p.grad is not None]
    torch.testing.assert_close(found, [2 * g for g in expected])


@on_ranks(3)
def test_actor_and_critic_take_turns(rank: int) -> None:
    """Two models and a frozen reference in blocks inside of each other; ranks call them in other orders."""
    plain, models, optimizers = [Net(), Net(), Net()], [], []
    for way in ("FSDP", "ShardedDDP", "fully_shard"):
        model, optimizer = _sharded(way)
        models.append(model)
        optimizers.append(optimizer)
    truths = [torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=1e-2) for m in plain[:2]]
    for step, per_rank in enumerate([[0, 1, 2], [3, 1, 0], [0, 0, 0], [1, 1, 1], [0, 2, 0]]):
        seeds = [1000 * step + 10 * k + rank for k in range(per_rank[rank])]
        with shardkit.uneven(models[0]) as first:
            if rank == 1:
                _evaluate(models[0], plain[0], 1)
            with shardkit.uneven(models[1]) as second, shardkit.uneven(models[2]):
                blocks = list(zip((first, second), models[:2], strict=True))
                pairs = [(work, model, seed) for seed in seeds for work, model in blocks]
                for work, model, seed in pairs if rank < 2 else pairs[::-1]:
                    _evaluate(models[2], plain[2], 2)
                    work.weighted(_loss(model, seed), 1 + seed % 3).backward()
                _evaluate(models[1], plain[1], rank)
            if seeds:  # one more for the outer model
                _loss(models[0], seeds[0]).backward()
        every = [1000 * step + 10 * k + r for r, n in enumerate(per_rank) for k in range(n)]
        weights = [(seed, 1 + seed % 3) for seed in every]
        more = [(1000 * step + r, 1) for r, n in enumerate(per_rank) if n]
        for model, mine in ((plain[0], [*weights, *more]), (plain[1], weights)):
            for seed, weight in mine:
                (weight / sum(w for _, w in mine) * _loss(model, seed)).backward()
        for each in (*optimizers[:2], *truths):
            each.step()
            each.zero_grad()
    for model, truth in zip(models, plain, strict=True):
        assert_same(model, truth, rtol=1e-12, atol=1e-12)


def _in_a_block(model: nn.Module, once: bool, between: Callable[[], object], late: bool = False) -> None:
    """Runs two micro-batches; the call comes after the first backward, or after the second forward."""
    with shardkit.uneven(model, once=once):
        _loss(model, 2).backward()
        loss = _loss(model, 3) if late else None
        between()
        (_loss(model, 3) if loss is None else loss).backward()


@pytest.mark.parametrize("way", ["FSDP", "fully_shard", "ShardedDDP"])
@on_ranks(2)
def test_gradients_are_left_alone_inside(rank: int, way: str) -> None:
    """What was cleared before the first backward is; later that is an error, and those from before are back."""
    plain = Net()
    _loss(plain, 1).backward()
    expected = float(nn.utils.clip_grad_norm_(plain.parameters(), 1e9))
    for once, to_none in itertools.product((False, True), (False, True)):
        model, optimizer = _sharded(way)
        clear = functools.partial(optimizer.zero_grad, set_to_none=to_none)
        for is_first in (True, False):
            with shardkit.uneven(model, once=once):
                clear() if not is_first else None
                if rank:
                    _loss(model, 1).backward()
        with shardkit.uneven(model, once=once):
            if rank:
                _loss(model, 1).backward()
        before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        for late in (False, True):
            with pytest.raises(LifecycleError, match="cleared or changed inside of uneven"):
                _in_a_block(model, once, clear, late)
            with pytest.raises(LifecycleError, match=r"step\(\) inside of uneven"):
                _in_a_block(model, once, optimizer.step, late)
        found = [p.grad for p in model.parameters() if p.grad is not None]
        torch.testing.assert_close(found, before, rtol=0.0, atol=0.0)
        _loss(model, 1).backward()  # adds to these, as after any step
        clip: Any = optimizer.clip_grad_norm if way == "ShardedDDP" else sharding_of(model).clip_grad_norm_
        assert float(clip(1e9)) == pytest.approx(3 * expected, rel=1e-12)


@on_ranks(2)
def test_what_is_refused_inside(rank: int) -> None:
    model, _ = _sharded("FSDP")
    other = fully_shard(Net())
    for once in (False, True):
        with shardkit.uneven(model, once=once), pytest.raises(LifecycleError, match="inside of another"):
            shardkit.uneven(other, once=not once).__enter__()
    with shardkit.uneven(model), pytest.raises(LifecycleError, match="of the same model"):
        shardkit.uneven(model).__enter__()
    with pytest.raises(LifecycleError, match=r"1 calls of .* 0 backwards"), shardkit.uneven(model):
        with shardkit.uneven(other):
            _loss(model, 0) + _loss(other, 0)
    in_order = fully_shard(Net(), reduce=shardkit.ReducePolicy(order="fixed"))
    with pytest.raises(LifecycleError, match=r'once=True\) with order="fixed"'):
        shardkit.uneven(in_order, once=True).__enter__()
    with pytest.raises(LifecycleError, match=r"1 calls of .* 0 backwards"), shardkit.uneven(model, once=True):
        _loss(model, 0) + _loss(model, 0)
    ddp, _ = _sharded("ShardedDDP")
    with shardkit.uneven(ddp):
        with torch.no_grad():
            _loss(ddp, 0)  # meets nobody
        for _ in range(rank):
            _loss(ddp, 0).backward()


class Branches(nn.Module):
    """One of two layers, behind a trainable one without gradients."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.silent, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH, affine=False)
        self.branches, self.which = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]), 0
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            x = x + self.silent(x).to(x.dtype)
        out: torch.Tensor = self.branches[self.which](self.norm(x)).double()
        return out


@pytest.mark.parametrize("way", ["FSDP", "fully_shard", "ShardedDDP"])
@on_ranks(2)
def test_steps_in_parts(rank: int, way: str) -> None:
    """One object for all steps, of two blocks each, through other parameters; autocast; ranks that evaluated before."""
    model: Any
    optimizer: Any
    plain, found = Branches(), Branches()
    if way == "ShardedDDP":
        optimizer = shardkit.OSS(found.parameters(), torch.optim.Adam, lr=1e-2)
        model = ShardedDDP(found, optimizer)
    else:
        fully_shard(found.silent)
        model = DOORS[way](found)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    truth = torch.optim.Adam(plain.parameters(), lr=1e-2)
    works = [shardkit.uneven(model), shardkit.uneven(model, once=True)]
    for step, per_rank in enumerate([[0, 2], [2, 1], [0, 0], [1, 0], [0, 1], [1, 1]]):
        plain.which = found.which = step % 2
        model.eval() if way == "ShardedDDP" else None
        with works[step in (3, 4)]:
            for k in range(per_rank[rank]):
                model.train()
                _loss(model, 1000 * step + 10 * k + rank).backward()
        for r, n in enumerate(per_rank):
            for k in range(n):
                (_loss(plain, 1000 * step + 10 * k + r) / sum(per_rank)).backward()
        if step % 2:
            for each in (optimizer, truth):
                each.step()
            model.zero_grad()
            plain.zero_grad()
    if way != "ShardedDDP":
        assert int(found.norm.state_dict()["num_batches_tracked"]) == (4, 5)[rank]  # of its own
    values = found.named_parameters() if way == "ShardedDDP" else sharding_of(model).export()
    for name, value in values:
        if "norm" not in name:
            torch.testing.assert_close(value, plain.get_parameter(name), rtol=1e-9, atol=1e-9)


@on_ranks(2)
def test_ranks_that_meet_once_do_what_they_like(rank: int) -> None:
    """Ranks run other layers than others, evaluate, and train a second model; they meet once a step."""
    plain, found = Branches(), Branches()
    for each in (found.silent, *found.branches, found):
        fully_shard(each)
    plain_other, other = Net(), Net()
    for each in (other.blocks, other.frozen):
        torch_words([*each] if each is other.blocks else each)
    torch_words(other, ignored_params={other.head.weight})
    for step, per_rank in enumerate([[0, 3], [2, 1], [0, 0], [1, 3]]):
        with shardkit.uneven(found, once=True), shardkit.uneven(other, once=True) as work:
            for k in range(per_rank[rank]):
                found.which, seed = (rank + k) % 2, 1000 * step + 10 * k + rank
                loss = _loss(found, seed)
                with torch.no_grad():
                    _loss(other, seed)
                (loss + work.weighted(_loss(other, seed), 1 + k)).backward()  # through both
        every = [(r, k) for r, n in enumerate(per_rank) for k in range(n)]
        for r, k in every:
            plain.which, seed = (r + k) % 2, 1000 * step + 10 * k + r
            (_loss(plain, seed) / len(every)).backward()
            ((1 + k) / sum(1 + k for _, k in every) * _loss(plain_other, seed)).backward()
        # this rank's own, as after a plain step
        if (own := other.head.weight.grad) is not None or any(per_rank):
            own = torch.zeros_like(other.head.weight) if own is None else own
            dist.all_reduce(own)
            other.head.weight.grad = own / 2
        for model in (found, other, plain, plain_other):
            torch.optim.SGD(model.parameters(), lr=0.1).step()
            model.zero_grad()
    plain.which = found.which = 1  # rank 0's last call was of the other branch
    torch.testing.assert_close(_loss(copy.deepcopy(found), 5), _loss(plain, 5), rtol=1e-12, atol=0.0)
    with shardkit.uneven(found):  # ranks are in step again
        for _ in range(2 * rank):
            _loss(found, 5).backward()
    _loss(plain, 5).backward()
    norm = nn.utils.clip_grad_norm_(plain.parameters(), 1e9)
    torch.testing.assert_close(sharding_of(found).clip_grad_norm_(1e9), norm, rtol=1e-12, atol=0.0)
    for model, truth in ((found, plain), (other, plain_other)):
        for name, value in sharding_of(model).export():
            if "norm" not in name:
                torch.testing.assert_close(value, truth.get_parameter(name), rtol=1e-12, atol=1e-12)


class Layer(nn.Module):
    """Some of two experts behind a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])

    def forward(self, x: torch.Tensor, chosen: tuple[int, ...]) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        return x + sum(self.experts[k](x) for k in chosen)


class Layers(nn.Module):
    """Layers any of which may be left out, every other one of them computed anew in backward."""

    units = tuple(f"layers.{k}{part}" for k in range(4) for part in (".experts.0", ".experts.1", ""))

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.layers, self.head = nn.ModuleList([Layer() for _ in range(4)]), nn.Linear(WIDTH, WIDTH)
        self.double()

    def forward(self, x: torch.Tensor, each: list[tuple[int, ...] | None]) -> torch.Tensor:
        for k, chosen in enumerate(each):
            if chosen is not None:
                layer = self.layers[k]
                x = x + (checkpoint(layer, x, chosen, use_reentrant=False) if k % 2 else layer(x, chosen))
        out: torch.Tensor = self.head(x)
        return out


def _loss_by_some(model: nn.Module, seed: int) -> torch.Tensor:
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    chosen = [draw.choice((None, (), (0,), (1,), (0, 1), (0, 1))) for _ in range(4)]
    x = torch.randn(3, WIDTH, generator=generator, dtype=torch.float64)
    return model(x, chosen).square().mean()


def _other_layers(rank: int, way: str, counts: list[list[int]]) -> None:
    """Each micro-batch of each rank, and each evaluation, drops other layers and chooses other experts."""
    _compare(rank, way, counts, "each", True, Layers, _loss_by_some)


@pytest.mark.parametrize(("way", "backend"), WAYS)
def test_ranks_run_other_layers_than_others(way: str, backend: str) -> None:
    rank_pool(2).run(_other_layers, way, _counts(2, 2))
    rank_pool(3, backend).run(_other_layers, way, _counts(3, 3))
    rank_pool(4, backend).run(_other_layers, "hybrid", _counts(4, 1)) if way == "FSDP" else None


def test_other_layers_on_simulated_ranks() -> None:
    for seed in (2, 3, 6):
        way, world_size = ("FSDP", "fully_shard", "ShardedDDP")[seed % 3], 2 + seed % 7
        rank_pool(world_size, "simulated").run(
            _other_layers, way, _counts(world_size, seed)[: max(2, 12 // world_size)]
        )


SCALERS: dict[str, Callable[..., torch.amp.GradScaler]] = {
    "unscale": functools.partial(torch.amp.GradScaler, "cpu"),
    "our unscale": shardkit.GradScaler,
    "our unscale over ranks": shardkit.ShardedGradScaler,
}
ERRORS, REFUSED = (
    ("between", "forward", "inside", "loss", "backward", "evaluation", "inside an evaluation"),
    ("clear", "clear at the end", "clip", "our clip", *SCALERS),
)


def _clipped(model: nn.Module, optimizer: Any, norm: float) -> float:
    own: Any = (
        optimizer.clip_grad_norm if isinstance(model, ShardedDDP) else sharding_of(model).clip_grad_norm_
    )
    return float(own(norm))


def _failing_in_backward(module: nn.Module, inputs: object, output: torch.Tensor) -> None:
    output.register_hook(lambda _: int("bad"))


def _fails(
    model: nn.Module, outer: nn.Module, optimizer: Any, once: bool, where: str, count: int, bad: int
) -> None:
    """A rank has a bad batch in a block inside of another one, or does what is refused there."""
    scaler = SCALERS.get(where, shardkit.GradScaler)(init_scale=8.0)
    refused: dict[str, Callable[[], object]] = {
        "clear": optimizer.zero_grad,
        "clip": lambda: nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], 1.0),
        "our clip": lambda: _clipped(model, optimizer, 1.0),
    } | dict.fromkeys(SCALERS, lambda: scaler.unscale_(optimizer))
    with shardkit.uneven(outer, once=once), shardkit.uneven(model, once=once):
        _loss(outer, 1).backward()
        for k in range(count):
            is_bad = k == bad
            if is_bad and where == "between":
                raise ValueError("a bad batch")
            with contextlib.ExitStack() as undo:
                if is_bad and where.startswith("inside"):
                    undo.callback(model.blocks[2].register_forward_pre_hook(lambda *_: int("bad")).remove)
                elif is_bad and where == "backward":
                    undo.callback(model.blocks[0].register_forward_hook(_failing_in_backward).remove)
                if is_bad and where.endswith("evaluation"):
                    with torch.no_grad():
                        _loss(model, k) if where.startswith("inside") else model(None)
                loss = scaler.scale(model(None) if is_bad and where == "forward" else _loss(model, k))
            if is_bad and where == "evaluate":
                with torch.no_grad():
                    _loss(model, k)
            elif is_bad and where not in ("backward", "clear at the end"):
                refused.get(where, lambda: int("a loss"))()
            loss.backward()
        if where == "clear at the end" and bad >= 0:
            optimizer.zero_grad()


def _told(rank: int, way: str, places: list[str]) -> None:
    plain = Net()
    for seed in (5, 6):
        _loss(plain, seed).backward()
    norm = float(nn.utils.clip_grad_norm_(plain.parameters(), 1e9))
    for once, where, bad in itertools.product((False, True), places, (0, 1)):
        if (where == "evaluate" and (once or way == "ShardedDDP")) or (where in REFUSED and bad == 0):
            continue  # it is right there, or there is no gradient yet
        model, optimizer = _sharded(way)
        _loss(model, 5).backward()
        other = fully_shard(Net())
        refused = where in (*REFUSED, "evaluate")
        own = LifecycleError if refused else (ValueError, TypeError)
        with pytest.raises(own if rank else OutOfStepError) as raised:
            _fails(model, other, optimizer, once, where, 3, bad if rank else -1)
        if rank == 0:
            assert "rank 1 gave up: it left uneven() by " in str(raised.value), where
            assert "once=True" not in str(raised.value)
        assert all(p.grad is None for p in other.parameters())
        with shardkit.uneven(model, once=once):
            _loss(model, 6).backward() if rank else None
        assert _clipped(model, optimizer, 1e9) == pytest.approx(norm, rel=1e-12)


@pytest.mark.parametrize(("way", "backend"), WAYS)
def test_an_error_on_one_rank_is_told_and_the_next_block_is_right(way: str, backend: str) -> None:
    places = [*ERRORS, *REFUSED, "evaluate"]
    rank_pool(2, backend).run(_told, way, places[:: 1 if backend == "simulated" else 2])
    rank_pool(2).run(_told, way, places[::4]) if backend == "simulated" else None


def _drawn_errors(rank: int, seed: int) -> None:
    """Some ranks have a bad batch at some place, after a block that shows the order or none, and before a right one."""
    draw, world_size = random.Random(seed), 2 + seed % 7
    way, once = draw.choice(["FSDP", "fully_shard", "ShardedDDP"]), draw.random() < 0.3
    # a rank may own nothing to clear
    where = draw.choice(ERRORS if way == "ShardedDDP" else ERRORS + REFUSED)
    counts = [draw.randint(1, 3) for _ in range(world_size)]
    bad = [draw.choice((-1, -1, k)) for k in map(draw.randrange, counts)]
    if where in REFUSED:  # there is no gradient before
        bad = [-1 if k == 0 else k for k in bad]
    model, optimizer = _sharded(way)
    other, plain = fully_shard(Net()), Net()
    if draw.random() < 0.5:
        with shardkit.uneven(model):
            _loss(model, 0).backward()
        optimizer.zero_grad()
    found: Exception | None = None
    try:
        _fails(model, other, optimizer, once, where, counts[rank], bad[rank])
    except (LifecycleError, ValueError, TypeError, OutOfStepError) as error:
        found = error
    assert isinstance(found, OutOfStepError) == (bad[rank] < 0 and max(bad) >= 0)
    assert (found is None) == (max(bad) < 0)
    optimizer.zero_grad()
    with shardkit.uneven(model, once=draw.random() < 0.3):
        for k in range(counts[rank]):
            _loss(model, 10 * k + rank).backward()
    for r, n in enumerate(counts):
        for k in range(n):
            (_loss(plain, 10 * k + r) / sum(counts)).backward()
    norm = float(nn.utils.clip_grad_norm_(plain.parameters(), 1e9))
    assert _clipped(model, optimizer, 1e9) == pytest.approx(norm, rel=1e-12)


def test_drawn_errors_on_simulated_ranks() -> None:
    for seed in range(14):
        rank_pool(2 + seed % 7, "simulated").run(_drawn_errors, seed)


def _astray(rank: int) -> str:
    """A rank calls a model that has no block."""
    model, other = fully_shard(Branches()), fully_shard(Net())
    try:
        with shardkit.uneven(model):
            for k in range(1 + rank):
                _loss(other, 0) if k else None
                _loss(model, k).backward()
    except OutOfStepError as error:
        return str(error)
    return ""


def test_who_goes_astray_is_out_of_step() -> None:
    if DEVICE["name"] == "streams":
        pytest.skip("the device refuses, too, what ranks have issued out of step")
    for said in run_once(2, "simulated", _astray):
        assert "Inside of uneven() ranks meet at each layer" in said
        assert "uneven(model, once=True)" in said


class InOrder(nn.Module):
    """Calls its layers as it is told, computes some of them anew in backward, and some without gradients."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH).double() for _ in range(3)])

    def forward(self, x: torch.Tensor, order: str) -> torch.Tensor:
        for k, how in zip(order[::2], order[1::2], strict=True):
            layer = self.layers[int(k)]
            with torch.set_grad_enabled(how != "n"), contextlib.suppress(TypeError):
                x = (
                    checkpoint(layer, x, use_reentrant=False)
                    if how == "c"
                    else layer(None if how == "e" else x)
                )
        return x


def _train_in(model: nn.Module, *orders: str, share: float = 1.0) -> None:
    for order in orders:
        (share * model(torch.linspace(-1, 1, WIDTH).double()[None], order).square().mean()).backward()


@on_ranks(2)
def test_the_order_of_layers_on_all_ranks(rank: int) -> None:
    """Another one, and what is computed anew or without gradients, is an error; then ranks learn one for both."""
    for first, bad, then, word in (
        ("0-2-", "2-0-", ["2-0-", "2-"], "calls 'layers.0'"),  # earlier
        ("0-1-", "0-1-0-", ["0-1-0-", "1-0-"], "calls 'layers.0'"),  # again
        ("0-2-", "0c2-", ["0c2-", "2-"], "computes 'layers.0' anew"),
        ("0n2-", "0-2-", ["0-2-", "0-"], "computes 'layers.0' anew, or with gradients"),
        # what nobody has called yet has the model's place
        ("0-2-", "0-2e", ["0-2-", "0-1c2-"], "leaves 'the model' after an error inside of it"),
    ):
        plain, model = InOrder(), InOrder()
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
        with shardkit.uneven(model):
            _train_in(model, first)
        model.zero_grad()
        with pytest.raises(LifecycleError if rank else OutOfStepError, match=word), shardkit.uneven(model):
            _train_in(model, first, bad if rank else first)
        assert all(p.grad is None for p in model.parameters())
        for order in then:
            with shardkit.uneven(model):
                _train_in(model, order if rank else first)
            _train_in(plain, first, order, share=0.5)
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 1e9)
        torch.testing.assert_close(sharding_of(model).clip_grad_norm_(1e9), norm, rtol=1e-12, atol=0.0)


def _mixed(rank: int) -> None:
    model, _ = _sharded("FSDP")
    with shardkit.uneven(model):
        if rank:
            with sharding_of(model).no_sync() if rank == 1 else contextlib.nullcontext():
                _loss(model, 0).backward()


def test_no_sync_on_some_ranks_alone_is_told() -> None:
    with pytest.raises(RankFailedError, match=r"no_sync|different call|lost"):
        run_once(3, "gloo", _mixed)


class Two(nn.Module):
    """Computes with one layer or the other."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH).double() for _ in range(2)])

    def forward(self, x: torch.Tensor, k: int) -> torch.Tensor:
        return self.layers[k](x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("is_added", [False, True])
@on_ranks(2)
def test_gradients_from_before_stay_means(rank: int, is_added: bool) -> None:
    """The block gives the first layer nothing; a backward after it adds to what was reduced before.

    All ranks had that, if the optimizer gets the layer only now.
    """
    model, truth = Two(), Two()
    optimizer = shardkit.OSS(model.layers[is_added:].parameters(), torch.optim.SGD, lr=0.1)
    wrapped = ShardedDDP(model, optimizer)
    _loss(wrapped, rank, 0).backward()
    if is_added:
        optimizer.add_param_group({"params": model.layers[0].parameters()})
    with shardkit.uneven(wrapped):
        if rank:
            _loss(wrapped, 2, 1).backward()
    _loss(wrapped, 3 + rank, 0).backward()
    optimizer.step()
    for seed in (0, 1, 3, 4):
        (_loss(truth, seed, 0) / 2).backward()
    _loss(truth, 2, 1).backward()
    torch.optim.SGD(truth.parameters(), lr=0.1).step()
    assert_same(wrapped, truth, rtol=1e-12, atol=1e-12)
