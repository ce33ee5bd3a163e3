"""One rank runs out of memory somewhere in a step: all ranks skip the batch, and go on as if it had not been."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import shardkit
from shardkit import FSDP, OSS, ShardedDDP, fully_shard, hybrid_groups
from shardkit.training.out_of_memory import Shaped, forget_frames, is_out_of_memory
from tests.beside import batch
from tests.doors import through
from tests.pools import on_ranks, rank_pool

UNITS = 4
WIDE = 130  # units of it travel by themselves, those of 5 columns together
Made = tuple[nn.Module, Any]


class Model(nn.Module):
    """Units in a row, with statistics; memory may run out before one of them, forward or backward."""

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width)) for _ in range(UNITS)
        )
        self.place: tuple[str, int] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for k, block in enumerate(self.blocks):
            if self.place == ("forward", k):
                self._run_out()
            # every second one computes its activations again
            x = block(x) if k % 2 else checkpoint(block, x, use_reentrant=False)
            if self.place == ("backward", k):
                x.register_hook(self._run_out)
        if self.place == ("forward", UNITS):
            self._run_out()
        return x

    def loss(self, outputs: torch.Tensor) -> torch.Tensor:
        if self.place == ("loss", 0):
            self._run_out()
        return outputs.square().mean()

    def _run_out(self, _: torch.Tensor | None = None) -> None:
        self.place = None
        torch.empty(2**60, dtype=torch.uint8)  # the allocator's own error


PLACES = [("forward", k) for k in range(UNITS + 1)] + [("loss", 0)] + [("backward", k) for k in range(UNITS)]
FIRST = 3  # step that can be left: the first gathers nothing ahead, and two have to be alike
STEPS = FIRST + 2 * len(PLACES)


# ------------------------------------------------------------------ by what
def by_fsdp(model: Model, **options: Any) -> Made:
    wrapped = through("FSDP", model, *[f"blocks.{k}" for k in range(len(model.blocks))], **options)
    return wrapped, torch.optim.Adam(wrapped.parameters(), lr=0.1)


def in_place(model: Model) -> Made:
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=2)
    return fully_shard(model), torch.optim.Adam(model.parameters(), lr=0.1)


def by_hybrid(model: Model) -> Made:
    group, replicas = hybrid_groups(2)
    return by_fsdp(model, group=group, replicas=replicas)


def by_sharded_ddp(model: Model) -> Made:
    optimizer = OSS(model.parameters(), torch.optim.Adam, lr=0.1)
    reduce = shardkit.ReducePolicy(bucket_numel=50)
    return ShardedDDP(model, optimizer, reduce=reduce), optimizer


def with_a_frozen_unit(model: Model) -> Made:
    model.blocks[2].requires_grad_(False)
    return by_fsdp(model)


DOORS: dict[str, Callable[[Model], Made]] = {
    f.__name__: f for f in (by_fsdp, in_place, by_hybrid, by_sharded_ddp, with_a_frozen_unit)
}


def _trained(
    rank: int, door: str, places: dict[tuple[int, int], tuple[str, int]], without: set[int], micro: int
) -> tuple[dict[str, torch.Tensor], list[tuple[bool, int | None]]]:
    """The state after all steps but those ``without``; memory runs out at (step, rank) in these places."""
    model = Model()
    wrapped, optimizer = DOORS[door](model)
    skip = shardkit.SkipOutOfMemory(wrapped)
    told, kept = [], []
    for step in range(STEPS):
        if step in without:
            continue
        with skip:
            for part in range(micro):
                last = part == micro - 1
                model.place = places.get((step, rank)) if last else None
                with contextlib.nullcontext() if last else wrapped.no_sync():
                    outputs = wrapped(batch(rank, step + 100 * part, 6, 5))
                    kept.append(outputs)  # as those do who look at them after an epoch
                    model.loss(outputs).backward()
        told.append((skip.skipped, skip.rank))
        if skip.skipped:
            assert all(p.grad is None for p in wrapped.parameters())
            continue
        optimizer.step()
        optimizer.zero_grad()
    with shardkit.sharding_of(wrapped).summon_full_params() if "ddp" not in door else torch.no_grad():
        # copies: what is summoned goes
        state = {n: t.detach().clone() for n, t in (*model.named_parameters(), *model.named_buffers())}
    return state, told


def _both(
    rank: int, door: str, places: dict[tuple[int, int], tuple[str, int]], micro: int = 1
) -> list[tuple[bool, int | None]]:
    state, told = _trained(rank, door, places, set(), micro)
    skipped = {step for step, _ in places}
    expected, _ = _trained(rank, door, {}, skipped, micro)
    for name, value in expected.items():
        assert torch.equal(state[name], value), name
    for step, (was, who) in enumerate(told):
        ran_out = [r for s, r in places if s == step]
        assert was == bool(ran_out)
        assert who == (max(ran_out) if ran_out else None)
    return told


@pytest.mark.parametrize("backend", ["gloo", "simulated", "streams"])
@pytest.mark.parametrize("door", DOORS)
def test_training_goes_on_as_if_the_batch_had_not_been(door: str, backend: str) -> None:
    world_size = 4 if door == "by_hybrid" else 2
    places = {(FIRST + 2 * k, k % world_size): place for k, place in enumerate(PLACES)}
    # three in a row; in one of them both ranks
    places |= {
        (FIRST + 1, 0): PLACES[2],
        (FIRST + 2, 0): PLACES[-1],
    }
    rank_pool(world_size, backend).run(_both, door, places)


@pytest.mark.parametrize("door", ["by_fsdp", "by_sharded_ddp"])
def test_gradients_accumulated_in_the_step_go_with_it(door: str) -> None:
    places = {(FIRST + 2 * k, 2): place for k, place in enumerate(PLACES[::2])}
    rank_pool(3).run(_both, door, places, 2)


# ------------------------------------------------------------------ what is not skipped
def _too_early(rank: int) -> None:
    model = Model()
    wrapped, _ = by_fsdp(model)
    skip = shardkit.SkipOutOfMemory(wrapped)
    model.place = ("forward", 2) if rank else None
    with skip:
        wrapped(batch(rank, 0, 6, 5)).square().mean().backward()


def test_before_steps_are_known_the_error_is_raised() -> None:
    with pytest.raises(shardkit.RankFailedError, match="rank 1 failed with RuntimeError") as raised:
        rank_pool(2, "simulated").run(_too_early)
    assert "can't allocate memory" in raised.value.remote_traceback


def _train(
    rank: int, door: str, steps: int, inside: Callable[[int, Model, Any], None], width: int = 5
) -> str:
    model = Model(width)
    wrapped, optimizer = DOORS[door](model)
    skip = shardkit.SkipOutOfMemory(wrapped)
    try:
        for step in range(steps):
            with skip:
                model.place = None
                if step >= FIRST:
                    inside(rank, model, optimizer)
                wrapped(batch(rank, step, 6, width)).square().mean().backward()
            if not skip.skipped:
                optimizer.step()
            optimizer.zero_grad()
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _train_to_an_error(rank: int, door: str, steps: int) -> str:
    try:
        return _train(rank, door, steps, _runs_out)
    except MemoryError as error:
        return f"{type(error).__name__}: {error}"


def _runs_out(rank: int, model: Model, optimizer: Any) -> None:
    model.place = ("forward", 1) if rank == 0 else None


def _runs_out_after_a_step(rank: int, model: Model, optimizer: Any) -> None:
    for p in optimizer.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    optimizer.step()
    _runs_out(rank, model, optimizer)


def _branches_and_runs_out(rank: int, model: Model, optimizer: Any) -> None:
    model.blocks.insert(0, model.blocks[2])
    model.place = ("forward", 2) if rank == 0 else None


def _runs_out_before_a_branch(rank: int, model: Model, optimizer: Any) -> None:
    model.blocks.append(model.blocks[1])
    _runs_out(rank, model, optimizer)


@pytest.mark.parametrize("door", ["by_fsdp", "by_sharded_ddp"])
def test_ten_batches_in_a_row_are_an_error_on_all_ranks(door: str) -> None:
    for said in rank_pool(2).run(_train, door, FIRST + 11, _runs_out):
        assert said.startswith("LifecycleError")
        assert "10 batches in a row were skipped" in said
        assert "rank 0 ran" in said


@pytest.mark.parametrize("inside", [_runs_out_after_a_step, _branches_and_runs_out])
def test_what_can_not_be_left_is_raised(inside: Callable[[int, Model, Any], None]) -> None:
    own, others = rank_pool(2, "simulated").run(_train, "by_fsdp", FIRST + 1, inside, WIDE)
    assert "can't allocate memory" in own
    assert others.startswith("OutOfStepError")


def _again(shaped: Shaped) -> torch.Tensor:
    raise MemoryError("not enough memory for zeros")


def test_no_memory_for_zeros_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Shaped, "zeros", _again)  # simulated ranks are threads of this process
    own, others = rank_pool(2, "simulated").run(_train_to_an_error, "by_fsdp", FIRST + 1)
    assert own == "MemoryError: not enough memory for zeros"
    assert others.startswith("OutOfStepError")


def test_ranks_that_go_on_otherwise_than_before_are_out_of_step() -> None:
    for said in rank_pool(2, "simulated").run(_train, "by_fsdp", FIRST + 1, _runs_out_before_a_branch):
        assert said.startswith("OutOfStepError")


@on_ranks(2)
def test_refusals(rank: int) -> None:
    def says(text: str, *models: nn.Module) -> None:
        with pytest.raises(shardkit.ConfigurationError, match=text):
            shardkit.SkipOutOfMemory(*models)

    says("no FSDP or ShardedDDP module", Model())
    compressed = shardkit.ReducePolicy(compression=shardkit.Compression(), bucket_numel=None)
    says("error_feedback=False", FSDP(nn.Linear(600, 600), reduce=compressed))
    says("SyncBatchNorm talks to other ranks", FSDP(nn.Sequential(nn.Linear(5, 5), nn.SyncBatchNorm(5))))
    embedding = nn.Embedding(8, 4, sparse=True)
    says("sparse=False", ShardedDDP(embedding, OSS(embedding.parameters(), torch.optim.SGD, lr=0.1)))
    wrapped = FSDP(nn.Linear(5, 5))
    skip = shardkit.SkipOutOfMemory(wrapped)
    scale = shardkit.AdaScale(torch.optim.SGD(wrapped.parameters(), lr=0.1))
    says("AdaScale", wrapped)
    with pytest.raises(shardkit.ConfigurationError, match="AdaScale"), skip:
        pass
    scale.unhook()
    with skip, pytest.raises(shardkit.LifecycleError, match="entered already"), skip:
        pass
    assert not skip.skipped


def _costs(rank: int, width: int) -> tuple[int, int]:
    """Collectives that a step issues more, and attributes that groups have more afterwards."""
    model = Model(width)
    wrapped, _ = by_fsdp(model)
    skip = shardkit.SkipOutOfMemory(wrapped)
    group = shardkit.sharding_of(wrapped)._state.group
    channels = (group, *group.channels())
    before = [set(vars(g)) for g in channels]
    counts = []
    for step in range(4):
        first = sum(g.issued for g in (group, *group.channels()))
        if step == 2:
            wrapped(batch(rank, step, 6, width)).square().mean().backward()
        else:
            with skip:
                wrapped(batch(rank, step, 6, width)).square().mean().backward()
        counts.append(sum(g.issued for g in (group, *group.channels())) - first)
    assert [set(vars(g)) for g in channels] == before
    return counts[3] - counts[2], len(skip._calls.calls)


def test_a_step_costs_one_collective() -> None:
    # 11 collectives, or 3 where small units travel together, and a word before backward
    assert rank_pool(2, "simulated").run(_costs, WIDE) == [(1, 12)] * 2
    assert rank_pool(2, "simulated").run(_costs, 5) == [(1, 4)] * 2


class _Looking(TorchDispatchMode):
    """Notes whether something is alive whenever a tensor of zeros is made."""

    def __init__(self, alive: list[weakref.ref[nn.Module]]) -> None:
        super().__init__()
        self.alive, self.seen = alive, list[bool]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.alive and func is torch.ops.aten.zeros.default:
            self.seen.append(self.alive[0]() is not None)
        return func(*args, **(kwargs or {}))


def _frees_first(rank: int) -> list[bool]:
    alive: list[weakref.ref[nn.Module]] = []

    def dies(module: nn.Module, args: object) -> None:
        activations = nn.Module()
        if step == FIRST and rank == 0:
            alive.append(weakref.ref(activations))
            raise torch.OutOfMemoryError

    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
    model[1].register_forward_pre_hook(dies)
    wrapped = FSDP(model)
    skip = shardkit.SkipOutOfMemory(wrapped)
    with _Looking(alive) as looking:
        for step in range(FIRST + 1):
            with skip:
                wrapped(batch(rank, step, 6, 5)).sum().backward()
    assert skip.rank == 0
    return looking.seen


def test_the_step_is_freed_before_other_ranks_get_their_zeros() -> None:
    first, _ = rank_pool(2).run(_frees_first)
    assert first
    assert not any(first)


@on_ranks(2)
def test_reductions_of_complex_numbers(rank: int) -> None:
    """Reductions of them are made of two calls, of which only the outer one is called again."""
    model = FSDP(nn.Linear(5, 3, dtype=torch.complex64))
    skip = shardkit.SkipOutOfMemory(model)
    for step in range(FIRST + 2):
        with skip:
            outputs = model(batch(rank, step, 6, 5).to(torch.complex64))
            if step == FIRST and rank == 1:
                raise MemoryError
            outputs.abs().sum().backward()
        if skip.skipped:
            assert step == FIRST
    assert not skip.skipped


def test_frames_that_an_error_came_through_are_forgotten() -> None:
    class Held:
        pass

    alive: list[weakref.ref[Held]] = []

    def inner() -> None:
        held = Held()
        alive.append(weakref.ref(held))
        raise MemoryError

    def outer() -> None:
        try:
            inner()
        except MemoryError as first:
            raise RuntimeError("CUDA error: out of memory") from first

    with pytest.raises(RuntimeError) as raised:
        outer()
    assert is_out_of_memory(raised.value)
    assert alive[0]() is not None
    forget_frames(raised.value)
    assert alive[0]() is None
    assert not is_out_of_memory(ValueError("out of memory"))
    assert not is_out_of_memory(None)


@on_ranks(2)
def test_parameters_beside_oss_that_a_step_leaves_unused(rank: int) -> None:
    """Which gradients there are decided how many calls ranks made, so that the one that left was out of step."""
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
    model = ShardedDDP(Chosen(layers), OSS(layers[0].parameters(), torch.optim.SGD, lr=0.1))
    skip = shardkit.SkipOutOfMemory(model)
    for step in range(6):
        with skip:
            model(torch.ones(2, 4), rank == 1 and step in (3, 5), step < 3).sum().backward()
        assert skip.skipped == (step in (3, 5))
        assert (layers[1].weight.grad is None) == (step > 2)
        model.zero_grad()


class Chosen(nn.Module):
    """Leaves a layer out where it is told to."""

    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: torch.Tensor, runs_out: bool, uses_all: bool) -> torch.Tensor:
        y = self.layers[0](self.layers[1](x) if uses_all else x)
        if runs_out:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return y
