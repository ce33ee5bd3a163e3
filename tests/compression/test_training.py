"""FSDP and ShardedDDP whose parameters and gradients travel as blocks, beside the same without."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from shardkit import (
    FSDP,
    OSS,
    Compression,
    OffloadPolicy,
    PrecisionPolicy,
    ReducePolicy,
    ReshardPolicy,
    ShardedDDP,
    ShardedGradScaler,
    fully_shard,
    hybrid_groups,
)
from shardkit.backend import Backend, get_backend
from shardkit.errors import ConfigurationError, RankMismatchError
from shardkit.reduction.compression import BlockFormat, check_compressible
from tests.backends.streams_device import current_device
from tests.benchmarks.accuracy import characters, digits
from tests.doors import through
from tests.figures.counters import OperationCounter
from tests.pools import DEVICE, on_ranks, rank_pool

WIDTH, STEPS = 72, 6
INT8 = Compression()
BOTH: dict[str, Any] = {
    "precision": PrecisionPolicy(compression=INT8),
    "reduce": ReducePolicy(compression=INT8),
}


class Net(nn.Module):
    """Weights of more than a block and biases of less, one that ranks may leave out, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 97), nn.Linear(97, WIDTH)
        self.extra = nn.Linear(WIDTH, WIDTH)
        self.fixed = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: torch.Tensor, with_extra: bool = True) -> torch.Tensor:
        x = self.second(torch.tanh(self.first(x)))
        if with_extra:
            x = x + self.extra(x)
        return self.head(torch.tanh(self.fixed(x)))


def build() -> Net:
    generator = torch.Generator().manual_seed(0)
    model = Net()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) / WIDTH**0.5)
    return model


def wrapped(**options: Any) -> FSDP:
    return through("FSDP", build(), "first", "second", **options)  # type: ignore[no-any-return]


def in_place(**options: Any) -> nn.Module:
    model = build()
    fully_shard(model.first, **options)
    fully_shard(model.second, **options)
    return fully_shard(model, **options)


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(8, WIDTH, generator=generator), torch.randint(5, (8,), generator=generator)


def train(
    model: Any, rank: int, *, steps: int = STEPS, accumulate: bool = False, optimizer: Any = None,
    skip: Callable[[int, int], bool] | None = None,
) -> list[float]:  # fmt: skip
    """Losses; ``skip(rank, step)`` says who leaves the extra layer out."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for step in range(steps):
        for part in range(2 if accumulate else 1):
            x, y = batch(rank, 10 * step + part)
            quiet = model.no_sync() if accumulate and part == 0 else contextlib.nullcontext()
            with quiet:
                loss = functional.cross_entropy(
                    model(x, not (skip is not None and skip(rank, step))).float(), y
                )
                loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def full(model: FSDP) -> dict[str, torch.Tensor]:
    return {k: v.clone() for k, v in model.state_dict().items()}


def sharded_ddp(reduce: ReducePolicy | None = None, net: nn.Module | None = None) -> tuple[ShardedDDP, OSS]:
    model = build() if net is None else net
    optimizer = OSS(model.parameters(), torch.optim.SGD, lr=0.05, momentum=0.9)
    return ShardedDDP(model, optimizer, reduce=reduce), optimizer


def near(found: Sequence[float], truth: Sequence[float], by: float) -> None:
    assert max(abs(a - b) for a, b in zip(found, truth, strict=True)) < by, (found, truth)


worlds = pytest.mark.parametrize("world_size", [2, 3])
HALF = PrecisionPolicy(compute=torch.bfloat16)
FP8 = Compression(torch.float8_e4m3fn, 64)


# ------------------------------------------------------------ losses
@on_ranks(2, 3, (2, "streams"), (3, "simulated"))
def test_losses_are_those_of_the_same_without(rank: int) -> None:
    truth = train(wrapped(), rank)
    for options in (BOTH, {"reduce": ReducePolicy(compression=FP8)}):
        near(train(wrapped(**options), rank), truth, 0.02)
    near(train(in_place(**BOTH), rank), truth, 0.02)
    offloaded = wrapped(offload=OffloadPolicy(parameters=True), **BOTH)
    near(train(offloaded, rank), truth, 0.02)
    half = PrecisionPolicy(compute=torch.bfloat16, compression=INT8)
    fp32_sums = ReducePolicy(compression=INT8, dtype=torch.float32)
    near(train(wrapped(precision=half, reduce=fp32_sums), rank), train(wrapped(precision=HALF), rank), 0.03)
    accumulated = train(wrapped(), rank, accumulate=True)
    near(train(wrapped(**BOTH), rank, accumulate=True), accumulated, 0.02)
    model, optimizer = sharded_ddp(BOTH["reduce"])
    near(train(model, rank, optimizer=optimizer), truth, 0.02)
    model, optimizer = sharded_ddp(BOTH["reduce"])
    near(train(model, rank, optimizer=optimizer, accumulate=True), accumulated, 0.02)


# ------------------------------------------------------------ parameters
class _Seen(nn.Module):
    """Remembers the weights that it computed with."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner
        self.values: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.values.append(self.inner.weight.detach().clone())
        return self.inner(x)


def _parameters(rank: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    torch.manual_seed(3)
    seen = _Seen(nn.Linear(64, 65, bias=False))
    exact = seen.inner.weight.detach().clone()
    model = FSDP(seen, precision=PrecisionPolicy(compression=INT8))
    model(torch.ones(2, 64)).sum().backward()
    model.eval()(torch.ones(2, 64))
    with model.summon_full_params():
        assert torch.equal(seen.inner.weight, exact)
        model(torch.ones(2, 64))
    assert torch.equal(full(model)["inner.weight"], exact)
    shard = next(model.parameters()).detach()
    world = model._state.group.world_size
    assert torch.equal(
        torch.cat([exact.view(-1), exact.new_zeros(-exact.numel() % world)]).chunk(world)[rank], shard
    )
    return exact, seen.values


@pytest.mark.parametrize("world_size", [2, 3])
def test_all_ranks_compute_with_the_same_values_and_keep_exact_ones(world_size: int) -> None:
    """A rank's own part too is what its blocks stand for; within summon_full_params a forward takes exact ones."""
    answers = rank_pool(world_size).run(_parameters)
    exact, (train_values, eval_values, summoned) = answers[0]
    assert torch.equal(summoned, exact)
    for _, seen in answers:
        assert all(torch.equal(v, train_values) for v in seen[:2])
    assert torch.equal(train_values, eval_values)
    blocks, parts = BlockFormat(INT8.dtype, INT8.block), []
    padded = torch.cat([exact.view(-1), exact.new_zeros(-exact.numel() % world_size)])
    for shard in padded.chunk(world_size):
        made, result = blocks.empty(blocks.blocks_of(shard.numel()), shard), torch.empty(1, shard.numel())
        blocks.encode(shard, made)
        blocks.decode(made.view(1, -1, blocks.nbytes), result)
        parts.append(result[0])
    assert torch.equal(train_values.view(-1), torch.cat(parts)[: exact.numel()])
    assert not torch.equal(train_values, exact)


def _mesh(rank: int) -> list[float]:
    """Forward gathers blocks over all ranks; backward gathers what they stood for, from two ranks."""
    kept = wrapped(reshard=ReshardPolicy(after_forward=2), **BOTH)
    return train(kept, rank)


def test_a_mesh_within_hosts_is_not_compressed() -> None:
    pool = rank_pool(4, "simulated")
    assert pool.run(_mesh) == pool.run(_with_both)


def _with_both(rank: int) -> list[float]:
    return train(wrapped(**BOTH), rank)


# ------------------------------------------------------------ bytes
def _sent(step: Callable[[], Any]) -> float:
    with OperationCounter(dist.get_world_size()) as counter:
        step()
    return counter.sent


def _large() -> nn.Module:
    return nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)])


def _fsdp_bytes(rank: int) -> tuple[float, float]:
    counts = []
    for options in ({}, BOTH):
        model = through("FSDP", _large(), "0", "1", "2", "3", **options)
        model(torch.ones(2, 256)).sum().backward()
        x = torch.ones(2, 256)
        with torch.no_grad():
            gathers = _sent(lambda m=model, x=x: m(x))
        loss = model(x).sum()
        counts.append((gathers, _sent(loss.backward)))  # three gathers, four reductions
    (gathers, backward), (fewer, less) = counts
    reductions, fewer_reductions = backward - 0.75 * gathers, less - 0.75 * fewer
    return fewer / gathers, fewer_reductions / reductions


def _ddp_bytes(rank: int) -> tuple[float, ...]:
    counts = []
    for reduce in (ReducePolicy(), ReducePolicy(compression=INT8)):
        model, _ = sharded_ddp(reduce, _large())
        loss = model(torch.ones(2, 256)).sum()
        counts.append(_sent(loss.backward))
    return (counts[1] / counts[0],)


def _replica_bytes(rank: int) -> tuple[float, ...]:
    counts = []
    group, replicas = hybrid_groups(1)
    for reduce in (ReducePolicy(), ReducePolicy(compression=INT8)):
        model = FSDP(_large(), group=group, replicas=replicas, reduce=reduce)
        loss = model(torch.ones(2, 256)).sum()
        counts.append(_sent(loss.backward))
    return (counts[1] / counts[0],)


@worlds
@pytest.mark.parametrize("program", [_fsdp_bytes, _ddp_bytes, _replica_bytes])
def test_bytes_on_the_wire(program: Callable[[int], tuple[float, ...]], world_size: int) -> None:
    """Gathers, and reductions of each kind."""
    if DEVICE["name"] == "streams":
        pytest.skip("there collectives run as late as possible, outside of what is counted")
    for ratios in rank_pool(world_size).run(program):
        assert all(0.26 < ratio <= 0.28 for ratio in ratios), ratios


@on_ranks((3, "streams"))
def test_on_a_device_the_host_waits_for_nothing(rank: int) -> None:
    """The host waits for nothing in a step, and nothing is used before it was waited for."""
    model = wrapped(**BOTH)
    ddp, oss = sharded_ddp(BOTH["reduce"])
    device = current_device()
    assert device is not None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        before = device.host_waits.copy()  # ranks compare something in the first step
        for m, o in ((model, optimizer), (ddp, oss)):
            x, y = batch(rank, step)
            nn.functional.cross_entropy(m(x), y).backward()
            o.step()
            o.zero_grad()
    assert device.host_waits == before
    assert device.unwaited() == []


# ------------------------------------------------------------ gradients
@on_ranks(2, 3)
def test_gradients_are_within_the_bound(rank: int) -> None:
    x, y = batch(rank, 0)
    own = build()
    nn.functional.cross_entropy(own(x), y).backward()
    largest = max(p.grad.abs().max().item() for p in own.parameters() if p.grad is not None)
    found = []
    for reduce in (ReducePolicy(), ReducePolicy(compression=INT8)):
        model = wrapped(reduce=reduce)
        nn.functional.cross_entropy(model(x), y).backward()
        found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    world = model._state.group.world_size
    everybody = model._state.group.all_gather_object(largest)
    bound = sum(everybody) / world / 254 * 1.001
    off = [(a - b).abs().max().item() for a, b in zip(*found, strict=True)]
    assert 0 < max(off) <= bound


@pytest.mark.parametrize("kind", ["fsdp", "sharded_ddp"])
@on_ranks(2, 3)
def test_an_overflow_is_seen_by_the_scaler(rank: int, kind: str) -> None:
    """Whoever overflows, all ranks leave the step out; what comes after is as if nothing had been."""
    model, optimizer = sharded_ddp(BOTH["reduce"]) if kind == "sharded_ddp" else (wrapped(**BOTH), None)
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=3e-3)
    scaler = ShardedGradScaler(init_scale=1.0, growth_interval=1000)
    before = [p.detach().clone() for p in model.parameters()]
    for step in range(2):
        x, y = batch(rank, step)
        loss = nn.functional.cross_entropy(model(x), y)
        if step == 0 and rank == 1:
            loss = loss * math.inf
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        now = [p.detach().clone() for p in model.parameters()]
        moved = any(not torch.equal(a, b) for a, b in zip(before, now, strict=True))
        assert moved == (step > 0)
        assert all(p.isfinite().all() for p in now)


SKIPS: list[Callable[[int, int], bool]] = [lambda rank, step: rank == 0, lambda rank, step: step % 2 == 0]


@pytest.mark.parametrize("which", [0, 1])
@on_ranks(2, 3)
def test_parameters_without_gradients(rank: int, which: int) -> None:
    """What only some ranks used gets their gradients; what none used stays as it is, momentum and all."""
    truth = train(wrapped(), rank, skip=SKIPS[which])
    model = wrapped(**BOTH)
    near(train(model, rank, skip=SKIPS[which]), truth, 0.02)
    before = full(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    train(model, rank, skip=lambda rank, step: True, optimizer=optimizer)
    after = full(model)
    for name in before:
        assert torch.equal(before[name], after[name]) == name.startswith(("extra", "fixed")), name
    plain, oss = sharded_ddp()
    truth = train(plain, rank, skip=SKIPS[which], optimizer=oss)
    model, oss = sharded_ddp(BOTH["reduce"])
    near(train(model, rank, skip=SKIPS[which], optimizer=oss), truth, 0.02)
    before = full(model.module)
    train(model, rank, skip=lambda rank, step: True, optimizer=oss)
    after = full(model.module)
    for name in before:
        assert torch.equal(before[name], after[name]) == name.startswith(("extra", "fixed")), name


@on_ranks(2)
def test_clipping(rank: int) -> None:
    norms = []
    for options in ({}, BOTH):
        model = wrapped(**options)
        x, y = batch(rank, 0)
        nn.functional.cross_entropy(model(x), y).backward()
        norms.append(float(model.clip_grad_norm_(0.01)))
        assert float(model.clip_grad_norm_(1.0)) == pytest.approx(0.01, rel=1e-3)
    assert norms[1] == pytest.approx(norms[0], rel=0.01)


# ------------------------------------------------------------ what is left out
class _Weights(nn.Module):
    """Every element has the same gradient in each step: one of a hundred, or one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4096))
        self.register_buffer("slopes", torch.ones(4096))
        self.slopes[::64] = 1000.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * self.slopes).sum() * x.mean()


def _small_beside_large(rank: int, kind: str, feedback: bool) -> float:
    """How far elements with small gradients have moved after 16 steps of 1."""
    reduce = ReducePolicy(compression=INT8, error_feedback=feedback)
    net: Any = _Weights()
    optimizer: Any = None
    if kind == "sharded_ddp":
        optimizer = OSS(net.parameters(), torch.optim.SGD, lr=1.0)
        net = ShardedDDP(net, optimizer, reduce=reduce)
    elif kind == "replicas":
        group, replicas = hybrid_groups(1, backend=get_backend("gloo"))
        net = FSDP(net, group=group, replicas=replicas, reduce=reduce)
    else:
        net = FSDP(net, reduce=reduce)
    optimizer = optimizer or torch.optim.SGD(net.parameters(), lr=1.0)
    for _ in range(16):
        net(torch.ones(1)).backward()
        optimizer.step()
        optimizer.zero_grad()
    state = net.module.state_dict() if kind == "sharded_ddp" else net.state_dict()
    return float(state["weight"][1])


@worlds
@pytest.mark.parametrize("kind", ["fsdp", "sharded_ddp", "replicas"])
def test_error_feedback_moves_what_is_small_beside_large(kind: str, world_size: int) -> None:
    """A scale of 1000 / 127 rounds each gradient of 1 to nothing; what was left out adds up to a code in time."""
    pool = rank_pool(world_size)
    assert pool.run(_small_beside_large, kind, False) == [0.0] * world_size
    for moved in pool.run(_small_beside_large, kind, True):
        assert -24 < moved < -8  # sixteen, by a code of 7.9 more or less


@on_ranks(2)
def test_loading_forgets_what_was_left_out(rank: int) -> None:
    """Loading forgets what was left out: a run goes on as one that was started from the same file."""
    for full_state in (True, False):
        first = wrapped(**BOTH)
        train(first, rank, steps=3)
        saved = full(first) if full_state else {k: v.clone() for k, v in first.local_state_dict().items()}
        train(first, rank, steps=2)
        second = wrapped(**BOTH)
        losses = []
        for model in (first, second):
            if full_state:
                model.load_state_dict(saved)
            else:
                model.load_local_state_dict(saved)
            losses.append(train(model, rank, optimizer=torch.optim.SGD(model.parameters(), lr=0.5)))
        assert losses[0] == losses[1]
    model, oss = sharded_ddp(BOTH["reduce"])
    train(model, rank, optimizer=oss)
    assert model._exchange is not None
    compressed = [b.compressed for b in model._exchange.buckets if b.compressed is not None]
    assert any(c.feedback.error is not None for c in compressed)
    model.load_state_dict(model.state_dict())
    assert all(c.feedback.error is None for c in compressed)


# ------------------------------------------------------------ replicas
def _hybrid(rank: int, shard_size: int) -> dict[str, torch.Tensor]:
    group, replicas = hybrid_groups(shard_size, backend=get_backend("simulated"))
    model = wrapped(group=group, replicas=replicas, **BOTH)
    truth = wrapped(group=group, replicas=replicas)
    near(train(model, rank), train(truth, rank), 0.02)
    return full(model)


@pytest.mark.parametrize("shard_size", [1, 2, 4])
def test_replicas_stay_equal_to_the_bit(shard_size: int) -> None:
    states = rank_pool(4, "simulated").run(_hybrid, shard_size)
    for state in states:
        assert all(torch.equal(state[name], states[0][name]) for name in state)


# ------------------------------------------------------------ what is refused
@on_ranks(2)
def test_what_cannot_be_compressed_is_refused_on_all_ranks(rank: int) -> None:
    for options in BOTH.items():
        with pytest.raises(ConfigurationError, match="float64 numbers don't fit"):
            FSDP(build().double(), **dict([options]))
    model = build().double()
    with pytest.raises(ConfigurationError, match="float64 numbers don't fit"):
        ShardedDDP(model, OSS(model.parameters(), torch.optim.SGD, lr=0.1), reduce=BOTH["reduce"])
    FSDP(build().double(), precision=PrecisionPolicy(compute=torch.float32, compression=INT8))
    with pytest.raises(RankMismatchError, match=r"precision\.compression"):
        FSDP(build(), precision=PrecisionPolicy(compression=INT8 if rank else None))
    with pytest.raises(RankMismatchError, match=r"reduce\.compression\.block"):
        FSDP(build(), reduce=ReducePolicy(compression=Compression(block=64 if rank else 128)))


def test_compiled_programs_are_refused() -> None:
    class Lazy:
        name, has_storage = "xla", False

    lazy: Backend = Lazy()  # type: ignore[assignment]
    check_compressible(None, [torch.float32], lazy)
    with pytest.raises(ConfigurationError, match="on xla all ranks run one compiled program"):
        check_compressible(INT8, [torch.float32], lazy)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dtype": torch.int16}, "can't be compressed to torch.int16"),
        ({"block": 0}, "must be a multiple of 16"),
        ({"block": 30}, "must be a multiple of 16"),
    ],
)
def test_wrong_options(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Compression(**arguments)


@on_ranks(1)
def test_one_rank(rank: int) -> None:
    """One rank sends nothing, so nothing is rounded."""
    assert train(wrapped(**BOTH), rank) == train(wrapped(), rank)


@pytest.mark.parametrize(("task", "short", "least"), [(digits, 2, 0.5), (characters, 30, 0.15)])
def test_held_out_accuracy(task: Callable[[int, str, int, int], float], short: int, least: float) -> None:
    """A short run of the benchmark, which has the figures over seeds; the same on every run."""
    exact, rounded = (rank_pool(2).run(task, variant, 0, short)[0] for variant in ("none", "int8"))
    assert exact > least
    assert abs(rounded - exact) < 0.02
