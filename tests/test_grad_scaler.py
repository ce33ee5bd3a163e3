"""ShardedGradScaler on real process groups against one process with torch.amp.GradScaler.

Tests named ``test_fairscale_...`` are cases in which fairscale 0.4.13 is wrong, hangs or raises.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import math
import pickle
from typing import Any

import pytest
import torch
import torch._dynamo  # the first optimizer imports it, and with it come environment variables that fixtures notice
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardkit.backend import ReduceOp
from shardkit.errors import ConfigurationError, LifecycleError
from shardkit.optim.grad_scaler import ShardedGradScaler as compat_scaler
from shardkit.training.grad_scaler import GradScaler, ShardedGradScaler
from tests.beside import reread
from tests.pools import on_ranks, rank_pool

SIZES = [2, 3]
OPTIONS: dict[str, Any] = {"init_scale": 1024.0, "growth_interval": 2}


def mlp() -> nn.Module:
    """In fp64: Adam makes rounding errors of small gradients large."""
    torch.manual_seed(0)
    layers = [nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5, bias=False), nn.Tanh(), nn.Linear(5, 3)]
    return nn.Sequential(*layers).double()


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return (
        model(torch.randn(4, 6, generator=generator, dtype=torch.float64).to(next(model.parameters())))
        .pow(2)
        .mean()
    )


def spoil(model: nn.Module, index: int, value: float) -> None:
    """What an overflow leaves in the gradient of one parameter."""
    grad = list(model.parameters())[index].grad
    if grad is not None:
        grad.view(-1)[-1] = value


# ---------------------------------------------------------------------- whole training runs
Step = dict[str, Any]


def train_alone(world_size: int, steps: list[Step], optim: Any) -> list[Any]:
    model = mlp()
    optimizer = optim(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", **OPTIONS)
    seen = []
    for number, step in enumerate(steps):
        optimizer.zero_grad()
        for rank in range(world_size):
            scaler.scale(loss_of(model, rank, number) / world_size).backward()
        if step["overflow"]:
            spoil(model, *step["overflow"])
        if step["clip"]:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), step["clip"])
        scaler.step(optimizer)
        scaler.update(step["new_scale"])
        seen.append((scaler.state_dict(), [p.detach().clone() for p in model.parameters()]))
    return seen


def train_on_a_rank(rank: int, engine: str, steps: list[Step], optim: Any) -> list[Any]:
    from shardkit.nn.data_parallel import ShardedDataParallel
    from shardkit.optim.oss import OSS

    inner = mlp()
    optimizer = OSS(inner.parameters(), optim, lr=0.1)
    if engine == "sharded_ddp":
        model: nn.Module = ShardedDataParallel(inner, optimizer)
    else:
        model = DistributedDataParallel(inner)
    scaler = compat_scaler(**OPTIONS)
    seen = []
    for number, step in enumerate(steps):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, rank, number)).backward()
        if step["overflow"]:
            index, value = step["overflow"]
            owner = optimizer.owner_of(list(inner.parameters())[index])
            if rank == owner:  # no other rank sees it
                spoil(inner, index, value)
        if step["clip"]:
            scaler.unscale_(optimizer)
            if engine == "ddp, torch's clip" and not step["overflow"]:
                nn.utils.clip_grad_norm_(inner.parameters(), step["clip"])
            else:
                optimizer.clip_grad_norm(step["clip"])
        scaler.step(optimizer)
        scaler.update(step["new_scale"])
        seen.append((scaler.state_dict(), [p.detach().clone() for p in inner.parameters()]))
    return seen


def check_training(world_size: int, engine: str, steps: list[Step], optim: Any = torch.optim.SGD) -> None:
    expected = train_alone(world_size, steps, optim)
    for rank, seen in enumerate(rank_pool(world_size).run(train_on_a_rank, engine, steps, optim)):
        for number, ((state, params), (true_state, true_params)) in enumerate(
            zip(seen, expected, strict=True)
        ):
            where = f"rank {rank}, step {number}: {steps[number]}"
            assert state == true_state, where
            for a, b in zip(params, true_params, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-9, msg=lambda m, w=where: f"{w}: {m}")


def plain(**other: Any) -> Step:
    return {"overflow": None, "clip": None, "new_scale": None, **other}


@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize("engine", ["ddp", "ddp, torch's clip", "sharded_ddp"])
def test_fairscale_hangs_when_one_rank_overflows(world_size: int, engine: str) -> None:
    steps = [
        plain(),
        plain(overflow=(0, math.inf)),
        plain(),
        plain(clip=0.05),
        plain(overflow=(4, math.nan), clip=0.05),
        plain(),
        plain(new_scale=256.0),
        plain(clip=0.05),
    ]
    check_training(world_size, engine, steps, torch.optim.AdamW)


step_draws = st.fixed_dictionaries(
    {
        "overflow": st.one_of(
            st.none(), st.tuples(st.integers(0, 4), st.sampled_from([math.inf, -math.inf, math.nan]))
        ),
        "clip": st.sampled_from([None, 0.02, 100.0]),
        "new_scale": st.sampled_from([None, None, None, 8.0, 4096.0]),
    }
)


@pytest.mark.parametrize("world_size", SIZES)
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    engine=st.sampled_from(["ddp", "ddp, torch's clip", "sharded_ddp"]),
    steps=st.lists(step_draws, min_size=1, max_size=6),
    optim=st.sampled_from([torch.optim.SGD, torch.optim.Adam]),
)
def test_drawn_training_runs(world_size: int, engine: str, steps: list[Step], optim: Any) -> None:
    check_training(world_size, engine, steps, optim)


# ---------------------------------------------------------------------- ranks that hold different gradients
def own_parameters(rank: int, kind: str, optim: Any, options: dict[str, Any], bad_rank: int | None) -> Any:
    """Every rank has parameters of its own; the last rank's get no gradient."""
    torch.manual_seed(rank)
    dtype = getattr(torch, kind)
    size = rank + 2
    params = [nn.Parameter(torch.randn(size, size).to(dtype)), nn.Parameter(torch.randn(size).to(dtype))]
    before = [p.detach().clone() for p in params]
    optimizer = optim(params, lr=0.5, **options)
    scaler = ShardedGradScaler(init_scale=2.0**20)
    scaler.scale(torch.tensor(1.0))
    scale = scaler.get_scale()
    last = rank == dist.get_world_size() - 1
    if not last:
        for p in params:
            p.grad = torch.full_like(p, 2.0)
    if rank == bad_rank:
        params[0].grad[-1, -1] = math.inf  # type: ignore[index]
    scaler.step(optimizer)
    scaler.update()
    moved = [not torch.equal(p, b) for p, b in zip(params, before, strict=True)]
    gradients = [] if last else [p.grad.double().view(-1)[0].item() for p in params]  # type: ignore[union-attr]
    return moved, gradients, scaler.get_scale() / scale


@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize("kind", ["float16", "bfloat16", "float32", "float64", "one that skips by itself"])
@pytest.mark.parametrize("bad_rank", [None, 0])
def test_dtypes_and_a_rank_without_gradients(world_size: int, kind: str, bad_rank: int | None) -> None:
    skips = "skips" in kind
    given = ("float32", torch.optim.AdamW, {"fused": True}) if skips else (kind, torch.optim.SGD, {})
    results = rank_pool(world_size).run(own_parameters, *given, bad_rank)
    for rank, (moved, gradients, change) in enumerate(results):
        last = rank == world_size - 1
        assert change == (1.0 if bad_rank is None else 0.5)
        if not skips:
            assert gradients == ([] if last else [pytest.approx(2.0 / 2**20)] * 2)
        # fp16 resolves 0.5 * 2**-19 nowhere near 1: only wide types show that they moved
        if bad_rank is not None or last:
            assert not any(moved)
        elif skips or kind in ("float32", "float64"):
            assert all(moved)


def test_it_is_a_scaler_of_the_old_name() -> None:
    """espnet's annotations ask for it, and fairscale's is one."""
    assert isinstance(compat_scaler(), torch.cuda.amp.GradScaler)


@on_ranks(*SIZES)
def test_fairscale_grows_the_scale_when_two_ranks_overflow(rank: int) -> None:
    p = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([p], lr=0.5)
    scaler = ShardedGradScaler(init_scale=64.0, growth_interval=1)
    scaler.scale(p.sum()).backward()
    if rank < 2:
        p.grad.fill_(math.nan)  # type: ignore[union-attr]
    scaler.step(optimizer)
    scaler.update()
    assert (p.tolist(), scaler.get_scale()) == ([1.0, 1.0], 32.0)


@on_ranks(*SIZES)
def test_several_optimizers_decide_for_themselves(rank: int) -> None:
    a, b, c = (nn.Parameter(torch.ones(2)) for _ in range(3))
    first = torch.optim.SGD([{"params": [a]}, {"params": [c], "lr": 0.25}], lr=0.5)
    second = torch.optim.SGD([b], lr=0.5)
    scaler = ShardedGradScaler(init_scale=64.0, growth_interval=1)
    for loss in scaler.scale([a.sum() + c.sum(), (b.sum(),)]):
        (loss[0] if isinstance(loss, tuple) else loss).backward()
    if rank == 1:
        b.grad[0] = math.inf  # type: ignore[index]
    scaler.unscale_(second)
    scaler.step(first)
    scaler.step(second)
    with contextlib.suppress(RuntimeError):
        scaler.step(second)
        raise AssertionError("a second step without update()")
    with contextlib.suppress(RuntimeError):
        scaler.unscale_(first)
        raise AssertionError("unscale_() after step()")
    scaler.update()
    assert (a.tolist(), b.tolist(), c.tolist(), scaler.get_scale()) == (
        [0.5, 0.5],
        [1.0, 1.0],
        [0.75, 0.75],
        32.0,
    )


def sparse(rank: int, bad_rank: int | None, dtype: torch.dtype) -> Any:
    table = nn.Parameter(torch.ones(4, 2, dtype=dtype))
    optimizer = torch.optim.SGD([table], lr=1.0)
    scaler = ShardedGradScaler(init_scale=8.0)
    scaler.scale(table.sum())
    # two entries for one index; their sum is what overflows in fp16
    entry = 40000.0 if rank == bad_rank else 8.0
    values = torch.full((3, 2), entry, dtype=dtype)
    table.grad = torch.sparse_coo_tensor([[1, 1, 3]], values, (4, 2))
    scaler.step(optimizer)
    scaler.update()
    return table[:, 0].tolist(), scaler.get_scale()


@pytest.mark.parametrize("world_size", SIZES)
def test_sparse_gradients(world_size: int) -> None:
    for dtype in (torch.float32, torch.float16):
        assert rank_pool(world_size).run(sparse, None, dtype) == [([1.0, -1.0, 1.0, 0.0], 8.0)] * world_size
    assert rank_pool(world_size).run(sparse, 1, torch.float16) == [([1.0] * 4, 4.0)] * world_size


# ---------------------------------------------------------------------- groups
def in_subgroup(rank: int, how: str, bad_rank: int) -> Any:
    from shardkit.optim.oss import OSS

    pair = dist.new_group([0, 1])
    if rank == 2:
        return None
    params = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))]
    if how == "of the optimizer":
        optimizer: Any = OSS(params, torch.optim.SGD, group=pair, lr=0.5)
        scaler = ShardedGradScaler(init_scale=64.0)
    else:
        optimizer = torch.optim.SGD(params, lr=0.5)
        scaler = ShardedGradScaler(init_scale=64.0, process_group=pair)
    scaler.scale(params[0].sum() + params[1].sum()).backward()
    if rank == bad_rank:
        for p in params:
            p.grad[0] = math.nan  # type: ignore[index]
    scaler.step(optimizer)
    scaler.update()
    return [p.tolist() for p in params], scaler.get_scale()


@pytest.mark.parametrize("how", ["of the optimizer", "given"])
def test_group(how: str) -> None:
    assert rank_pool(3).run(in_subgroup, how, 2) == [([[0.5, 0.5], [0.5, 0.5]], 64.0)] * 2 + [None]
    assert rank_pool(3).run(in_subgroup, how, 1) == [([[1.0, 1.0], [1.0, 1.0]], 32.0)] * 2 + [None]


# ---------------------------------------------------------------------- misuse
@on_ranks(*SIZES)
def test_a_rank_that_never_scaled_is_named_everywhere(rank: int) -> None:
    p = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([p], lr=0.5)
    scaler = ShardedGradScaler(init_scale=64.0)
    errors = []
    for attempt in range(2):
        optimizer.zero_grad()
        loss = p.sum()
        (loss if rank == 1 and attempt == 0 else scaler.scale(loss)).backward()
        try:
            scaler.step(optimizer)
        except LifecycleError as e:
            errors.append(str(e))
            assert p.tolist() == [1.0, 1.0]
    assert p.tolist() != [1.0, 1.0]
    (message,) = errors
    assert message.startswith("this rank" if rank == 1 else "another rank")


def scaled_step(scaler: Any, p: nn.Parameter, optimizer: Any, bad: bool = False) -> None:
    optimizer.zero_grad()
    scaler.scale(p.sum()).backward()
    if bad:
        p.grad[0] = math.inf  # type: ignore[index]
    scaler.step(optimizer)
    scaler.update()


@on_ranks(2)
def test_closures_are_refused(rank: int) -> None:
    p = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([p], lr=0.5)
    scaler = ShardedGradScaler()
    scaler.scale(p.sum()).backward()
    for call in (
        lambda: scaler.step(optimizer, lambda: 1.0),
        lambda: scaler.step(optimizer, closure=lambda: 1.0),
    ):
        with pytest.raises(ConfigurationError, match="closure"):
            call()
    scaler.step(optimizer, closure=None)
    assert p.tolist() == [0.5, 0.5]
    assert ShardedGradScaler(enabled=False).step(optimizer, lambda: 7.0) == 7.0


@pytest.mark.parametrize("bad", [{"growth_factor": 1.0}, {"backoff_factor": 1.0}, {"backoff_factor": 0.0}])
def test_factors_are_checked(bad: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(bad))):
        ShardedGradScaler(**bad)


# ---------------------------------------------------------------------- state
@on_ranks(2)
def test_fairscale_state_dict_after_a_back_off(rank: int) -> None:
    p = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([p], lr=0.5)
    fresh_state = ShardedGradScaler(**OPTIONS).state_dict()
    scaler, reference = ShardedGradScaler(**OPTIONS), torch.amp.GradScaler("cpu", **OPTIONS)
    assert fresh_state == reference.state_dict()
    other = nn.Parameter(torch.ones(2))
    other_optimizer = torch.optim.SGD([other], lr=0.5)
    for bad in (False, True, False, True, False, False, False):
        scaled_step(scaler, p, optimizer, bad)
        scaled_step(reference, other, other_optimizer, bad)
        saved = scaler.state_dict()
        assert saved == reference.state_dict()
        for copied in (ShardedGradScaler(), pickle.loads(pickle.dumps(scaler)), copy.deepcopy(scaler)):
            if copied.get_scale() != saved["scale"]:
                copied.load_state_dict(saved)
            assert copied.state_dict() == saved
            q = nn.Parameter(torch.ones(2))
            scaled_step(copied, q, torch.optim.SGD([q], lr=0.5))
            assert q.tolist() == [0.5, 0.5]
        scaler.load_state_dict(reread(saved))
        reference.load_state_dict(saved)


@on_ranks(2)
def test_update_with_a_new_scale(rank: int) -> None:
    p = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([p], lr=0.5)
    scaler = ShardedGradScaler()
    for new, expected in [
        (8, 8.0),
        (4.0, 4.0),
        (torch.tensor([16.0]), 16.0),
        (torch.tensor(2.0).double(), 2.0),
    ]:
        scaler.scale(p.sum()).backward()
        scaler.step(optimizer)
        scaler.update(new)
        assert scaler.get_scale() == expected
    with pytest.raises(ConfigurationError, match=r"shape \(2,\)"):
        scaler.update(torch.ones(2))


@on_ranks(2)
def test_process_groups_do_not_travel_in_pickles(rank: int) -> None:
    scaler = ShardedGradScaler(process_group=dist.new_group([0, 1]), backend="gloo")
    p = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([p], lr=0.5)
    scaled_step(scaler, p, optimizer)
    loaded = pickle.loads(pickle.dumps(scaler))
    of_0_2 = b"cshardkit.training.grad_scaler\n_Lost\n(Vthe process group was not pickled\ntR."
    assert loaded.group == pickle.loads(of_0_2)
    loaded.scale(p.sum()).backward()
    with pytest.raises(LifecycleError, match=r"scaler\.group"):
        loaded.step(optimizer)
    loaded.group = None
    scaled_step(
        pickle.loads(pickle.dumps(loaded)) if not loaded._per_optimizer_states else loaded, p, optimizer
    )


# ---------------------------------------------------------------------- without ranks
def test_disabled_scaler_passes_everything_through() -> None:
    for scaler in (ShardedGradScaler(enabled=False), GradScaler(enabled=False)):
        p = nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([p], lr=0.5)
        loss = p.sum()
        assert scaler.scale(loss) is loss
        loss.backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert p.tolist() == [0.5, 0.5]
        assert scaler.state_dict() == {}
        assert scaler.get_scale() == 1.0
        scaler.load_state_dict({})
        assert not pickle.loads(pickle.dumps(scaler)).is_enabled()


def test_scale_of_nested_outputs() -> None:
    scaler = ShardedGradScaler(init_scale=4.0)
    one = torch.ones(())
    scaled = scaler.scale([one, (one, [one.half()]), one.bfloat16()])
    assert scaled == [4.0, (4.0, [4.0]), 4.0]
    assert isinstance(scaled[1], tuple)
    assert [v.item() for v in scaler.scale(v for v in (one, one))] == [4.0, 4.0]
    with pytest.raises(ValueError, match="Tensor"):
        scaler.scale([3])


def test_grad_scaler_alone_takes_half_precision_gradients() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        p = nn.Parameter(torch.ones(2, dtype=dtype))
        optimizer = torch.optim.SGD([p], lr=0.5)
        scaler = GradScaler(init_scale=64.0)
        assert scaler.is_enabled()
        scaled_step(scaler, p, optimizer)
        assert p.tolist() == [0.5, 0.5]
        scaled_step(scaler, p, optimizer, bad=True)
        assert (p.tolist(), scaler.get_scale()) == ([0.5, 0.5], 32.0)
        optimizer.zero_grad()
        with pytest.raises(AssertionError, match="No inf checks"):
            scaler.step(optimizer)


# ---------------------------------------------------------------------- XLA replicas
has_xla = pytest.mark.skipif(importlib.util.find_spec("torch_xla") is None, reason="needs torch_xla")


def train_on_xla(rank: int, engine: str, overflows: dict[int, float]) -> Any:
    from shardkit.backend import get_backend
    from shardkit.backends.xla import metrics
    from shardkit.optim.oss import OSS
    from shardkit.oss.sharded_ddp import ShardedDDP

    backend = get_backend("xla")
    group = backend.group()
    inner = mlp().float().to(backend.device())
    optimizer = OSS(inner.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    model = ShardedDDP(inner, optimizer) if engine == "sharded_ddp" else inner
    scaler = ShardedGradScaler(**OPTIONS)
    scales, compiled = [], []
    for step in range(9):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, rank, step)).backward()
        if engine == "oss":  # plain data parallel: every rank holds all means
            for p in inner.parameters():
                group.all_reduce(p.grad, op=ReduceOp.AVG)
        # as data, so that graphs are the same on all ranks
        factor = torch.tensor(overflows[step] if rank == 1 and step in overflows else 1.0).to(
            backend.device()
        )
        holders = inner.parameters() if engine == "oss" else optimizer.optim.param_groups[0]["params"]
        for p in holders:
            p.grad.mul_(factor)  # type: ignore[union-attr]
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        backend.mark_step(wait=True)
        group.barrier()
        compiled.append(metrics.compiles())
        group.barrier()
    return scales, compiled, [p.detach().cpu() for p in inner.parameters()]


@pytest.mark.xla
@has_xla
@pytest.mark.parametrize("engine", ["oss", "sharded_ddp"])
def test_overflow_on_one_rank_on_xla(engine: str) -> None:
    overflows = {2: math.inf, 5: math.nan}
    model = mlp().float()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", **OPTIONS)
    expected = []
    for step in range(9):
        optimizer.zero_grad()
        for rank in range(2):
            scaler.scale(loss_of(model, rank, step) / 2).backward()
        if step in overflows:
            spoil(model, 0, overflows[step])
        scaler.step(optimizer)
        scaler.update()
        expected.append(scaler.get_scale())
    for scales, compiled, params in rank_pool(2, "xla").run(train_on_xla, engine, overflows):
        assert scales == expected
        for a, b in zip(params, model.parameters(), strict=True):
            torch.testing.assert_close(a, b.detach(), rtol=1e-5, atol=1e-6)
        # nothing new after the first step, the first one with momentum, and the first one skipped
        assert len(set(compiled[3:])) == 1, compiled


def half_precision_on_xla(rank: int, kind: str, bad_rank: int | None) -> Any:
    from shardkit.backend import get_backend

    p = nn.Parameter(torch.ones(3, dtype=getattr(torch, kind), device=get_backend("xla").device()))
    optimizer = torch.optim.SGD([p], lr=0.5)
    scaler = ShardedGradScaler(init_scale=2.0**20)
    scaler.scale(torch.ones((), device=p.device))
    p.grad = torch.full_like(p, 2.0) * torch.tensor(math.inf if rank == bad_rank else 1.0).to(p)
    scaler.step(optimizer)
    scaler.update()
    return p.grad.float().cpu().tolist(), p.float().cpu().tolist(), scaler.get_scale()


@pytest.mark.xla
@has_xla
@pytest.mark.parametrize("kind", ["float16", "bfloat16", "float32", "float64"])
def test_dtypes_on_xla(kind: str) -> None:
    for grad, _, scale in rank_pool(2, "xla").run(half_precision_on_xla, kind, None):
        assert grad == [pytest.approx(2.0 / 2**20)] * 3
        assert scale == 2.0**20
    for _, params, scale in rank_pool(2, "xla").run(half_precision_on_xla, kind, 1):
        assert (params, scale) == ([1.0] * 3, 2.0**19)
