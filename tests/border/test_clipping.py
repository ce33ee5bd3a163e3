"""``torch.nn.utils`` on gradients of which each rank holds a part."""

from __future__ import annotations

import contextlib
import copy
import gc
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad

from shardkit import FSDP, OSS, ShardedDDP, ShardedGradScaler, sharding_of
from shardkit.backend import get_backend
from shardkit.errors import ConfigurationError, OutOfStepError, RankMismatchError
from tests.beside import reread
from tests.border.strategies import GLOO, STRATEGIES, WORLDS, Twins, heard, run, twins, wrapped
from tests.doors import through
from tests.pools import on_ranks, rank_pool, run_once

MAX_NORM = 0.1


def _own_clip(t: Twins, norm_type: float) -> torch.Tensor:
    if isinstance(t.optimizer, OSS):
        return t.optimizer.clip_grad_norm(MAX_NORM, norm_type)
    return sharding_of(t.model).clip_grad_norm_(MAX_NORM, norm_type)


# From where it is defined, here and below: torch_xla puts another function in its place (see tests/xla/test_border.py).
def _clip(rank: int, world_size: int, strategy: str, norm_type: float, options: dict[str, Any]) -> None:
    t = twins(rank, world_size, strategy)
    for step in range(3):
        t.zero_grad()
        t.backward(step)
        norm = clip_grad.clip_grad_norm_(t.model.parameters(), MAX_NORM, norm_type, **options)
        truth = clip_grad.clip_grad_norm_(t.plain.parameters(), MAX_NORM, norm_type, **options)
        assert type(norm) is torch.Tensor
        torch.testing.assert_close(norm, truth, rtol=1e-5, atol=0)
        assert truth > MAX_NORM
        t.step()
    t.assert_equal()


@pytest.mark.parametrize("world", WORLDS, ids=str)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("norm_type", [2.0, 1, math.inf])
def test_clip_grad_norm_of_torch(world: tuple[int, str], strategy: str, norm_type: float) -> None:
    run(world, _clip, strategy, norm_type, {})


class Reached(nn.Sequential):
    """Uses so many of its layers."""

    def forward(self, x: torch.Tensor, reach: int) -> torch.Tensor:
        return nn.Sequential(*self[:reach])(x)


@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.Adagrad])
@on_ranks(1, 2, 3)
def test_a_shard_without_gradients_is_met_in_norms(
    rank: int, world_size: int, kind: type[torch.optim.Optimizer], behind: bool
) -> None:
    """What is not used yet lies on the last rank, which met nobody; behind a ShardedDDP steps see plain gradients."""
    if behind:
        first = nn.Linear(4, 4)
        ShardedDDP(first, OSS(first.parameters(), torch.optim.SGD, lr=0.1))(torch.ones(2, 4)).sum().backward()
    plain = Reached(*(nn.Linear(4, 4, bias=False) for _ in range(world_size)))
    model: Any = FSDP(copy.deepcopy(plain))
    each = [(m, kind(m.parameters(), lr=0.1, weight_decay=0.1)) for m in (model, plain)]  # type: ignore[call-arg]
    for step, reach in enumerate((1, 1, 1, world_size)):
        norms = []
        for m, optimizer in each:
            optimizer.zero_grad()
            with model.no_sync() if m is model and step else contextlib.nullcontext():
                m(torch.ones(2, 4), 1).sum().backward()
            m(torch.ones(2, 4), reach).square().sum().backward()
            norms.append(clip_grad.clip_grad_norm_(m.parameters(), MAX_NORM, math.inf if step else 2))
            if step != 2:
                clip_grad.clip_grad_value_(m.parameters(), 0.05)
                optimizer.step()
        torch.testing.assert_close(*norms)
    torch.testing.assert_close(model.state_dict(), plain.state_dict())


@pytest.mark.parametrize("options", [{"foreach": True}, {"foreach": False}, {"error_if_nonfinite": True}])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_options_of_clip_grad_norm(strategy: str, options: dict[str, Any]) -> None:
    run((2, "gloo"), _clip, strategy, 2.0, options)


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(*GLOO)
def test_get_total_norm_and_clipping_by_value(rank: int, world_size: int, strategy: str) -> None:
    """The functions that ``clip_grad_norm_`` consists of, on gradients that were detached, scaled, copied."""
    t = twins(rank, world_size, strategy)
    t.backward()
    truth = nn.utils.get_total_norm([p.grad for p in t.plain.parameters()])
    for change in (lambda g: g, torch.Tensor.detach, torch.clone, lambda g: g.double(), lambda g: g * 1.0):
        norm = nn.utils.get_total_norm([change(p.grad) for p in t.model.parameters() if p.grad is not None])
        torch.testing.assert_close(norm.float(), truth, rtol=1e-5, atol=0)
    nn.utils.clip_grads_with_norm_(t.model.parameters(), MAX_NORM, truth)
    nn.utils.clip_grads_with_norm_(t.plain.parameters(), MAX_NORM, truth)
    t.step()
    t.optimizer.zero_grad(set_to_none=False)
    t.plain_optimizer.zero_grad(set_to_none=False)
    t.backward(1)  # adds to what is there
    nn.utils.clip_grad_value_(t.model.parameters(), 0.01)
    nn.utils.clip_grad_value_(t.plain.parameters(), 0.01)
    t.step()
    t.assert_equal()


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(3)
def test_a_norm_by_hand_is_of_the_ranks_own_part(rank: int, world_size: int, strategy: str) -> None:
    """Code that was written for shards sums over ranks itself."""
    t = twins(rank, world_size, strategy)
    t.backward()
    gradients = [p.grad for p in t.model.parameters() if p.grad is not None]
    for norm in (torch.norm, torch.linalg.vector_norm, torch.linalg.norm, torch.Tensor.norm):
        local = torch.stack([norm(g) for g in gradients] + [torch.zeros(())]).norm()
        total = local.square()
        torch.distributed.all_reduce(total)
        truth = nn.utils.get_total_norm([p.grad for p in t.plain.parameters()])
        torch.testing.assert_close(total.sqrt(), truth, rtol=1e-5, atol=0)


@pytest.mark.parametrize("door", ["FSDP", "fully_shard"])
@on_ranks(2)
def test_a_norm_by_hand_is_warned_of_once(rank: int, world_size: int, door: str) -> None:
    model = through(door, nn.Linear(4, 3), group=torch.distributed.new_group())
    for told in (1, 0):
        model(torch.ones(2, 4)).sum().backward()
        gradients = [p.grad for p in model.parameters()]
        with heard() as messages:
            clip_grad.clip_grad_norm_(model.parameters(), MAX_NORM)
            nn.utils.get_total_norm(gradients)
            assert not messages
            torch.stack([g.norm() for g in gradients]).norm()
        assert [f"rank {rank}: a norm of gradients" in m for m in messages] == [True] * told


@on_ranks(2)
def test_a_norm_by_hand_of_gradients_that_outlive_their_ranks(rank: int, world_size: int) -> None:
    group = torch.distributed.new_group()
    model: Any = FSDP(nn.Linear(4, 3), group=group)
    model(torch.ones(2, 4)).sum().backward()
    (gradient,) = [p.grad for p in model.parameters()]
    del model
    torch.distributed.destroy_process_group(group)
    gc.collect()
    torch.testing.assert_close(gradient.norm(), gradient.square().sum().sqrt())


@on_ranks(*GLOO)
def test_a_model_of_which_a_part_is_sharded(rank: int, world_size: int) -> None:
    """A module with an FSDP part and a part that every rank has whole."""

    def make() -> nn.Sequential:
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 4))

    plain, model = make(), make()
    model[0] = FSDP(model[0])
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(1))
    for m in (plain, model):
        m(x).square().mean().backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    truth = nn.utils.clip_grad_norm_(plain.parameters(), MAX_NORM)
    torch.testing.assert_close(norm, truth, rtol=1e-5, atol=0)
    torch.testing.assert_close(model[1].weight.grad, plain[1].weight.grad)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("norm_type", [-math.inf, -1.0, math.inf, 3.0])
@on_ranks(*WORLDS)
def test_norms_that_padding_would_change(rank: int, world_size: int, strategy: str, norm_type: float) -> None:
    t = twins(rank, world_size, strategy)
    t.backward()
    truth = nn.utils.get_total_norm([p.grad for p in t.plain.parameters()], norm_type)
    torch.testing.assert_close(_own_clip(t, norm_type), truth, rtol=1e-4, atol=0)


@on_ranks(2)
def test_norms_that_shards_cannot_have(rank: int, world_size: int) -> None:
    t = twins(rank, world_size, "fsdp")
    t.backward()
    with pytest.raises(ConfigurationError, match="clip_grad_norm_"):
        nn.utils.clip_grad_norm_(t.model.parameters(), MAX_NORM, -math.inf)
    with pytest.raises(ConfigurationError, match="norm_type=0"):
        t.model.clip_grad_norm_(MAX_NORM, 0)  # type: ignore[operator]


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}, {"capturable": False}], ids=str)
@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_steps_see_plain_tensors(rank: int, world_size: int, strategy: str, options: dict[str, Any]) -> None:
    """Steps see plain tensors; before, in hooks too, and afterwards gradients know that they are parts."""
    seen: list[type] = []
    inner: Any = None

    class Looks(torch.optim.AdamW):
        def _init_group(self, group: Any, params: Any, grads: Any, *args: Any) -> Any:
            found = super()._init_group(group, params, grads, *args)
            seen.extend(map(type, grads) if self is inner else ())
            return found

    t = twins(rank, world_size, strategy, Looks, lr=0.01, **options)
    inner = getattr(t.optimizer, "optim", t.optimizer)
    norms: list[torch.Tensor] = []
    for optimizer in (t.optimizer, t.plain_optimizer):
        optimizer.register_step_pre_hook(
            lambda o, *_: norms.append(nn.utils.clip_grad_norm_(_all_of(o), 0.01))
        )
    for step in range(2):
        t.zero_grad()
        t.backward(step)
        t.step()
    torch.testing.assert_close(norms[::2], norms[1::2], rtol=1e-5, atol=0)
    t.assert_equal()
    assert set(seen) <= {torch.Tensor}
    truth = nn.utils.get_total_norm([p.grad for p in t.plain.parameters()])
    norm = nn.utils.get_total_norm([p.grad for p in t.model.parameters() if p.grad is not None])
    torch.testing.assert_close(norm, truth, rtol=1e-5, atol=0)


def _all_of(optimizer: Any) -> list[nn.Parameter]:
    return [p for g in optimizer.param_groups for p in g["params"]]


@on_ranks(2)
def test_gradients_are_copied_and_saved_as_plain_tensors(rank: int, world_size: int) -> None:
    import copy

    model = wrapped("fsdp", nn.Sequential(nn.Linear(3, 5)))
    model(torch.ones(2, 3)).sum().backward()
    (param,) = model.parameters()
    for copied in (copy.deepcopy(param.grad), reread(param.grad)):
        assert type(copied) is torch.Tensor
        assert torch.equal(copied, param.grad)


def _nothing_here(rank: int) -> str:
    """torch's function has no gradient to ask on a rank that owns none, and goes on with 0; ours asks all ranks."""
    model = nn.Linear(6, 6, bias=False)
    optimizer = OSS(model.parameters(), torch.optim.SGD, lr=0.1)
    ShardedDDP(model, optimizer)(torch.ones(3, 6)).square().sum().backward()
    assert optimizer.clip_grad_norm(MAX_NORM) > MAX_NORM
    try:
        clip_grad.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
    except OutOfStepError as error:
        return str(error)
    return ""


def test_a_rank_that_owns_no_gradient_is_out_of_step() -> None:
    for end in rank_pool(2, "simulated").run(_nothing_here):
        assert "norm of gradients, for torch.nn.utils" in end


@on_ranks(2)
def test_order_0_counts_norms_that_other_ranks_have(rank: int, world_size: int) -> None:
    t = twins(rank, world_size, "sharded_ddp")
    t.backward()
    with pytest.raises(ConfigurationError, match=r"order 0.*OSS\.clip_grad_norm"):
        clip_grad.clip_grad_norm_(t.model.parameters(), MAX_NORM, 0.0)


@on_ranks(*GLOO[1:])
def test_a_part_of_what_is_spread_over_ranks(rank: int, world_size: int) -> None:
    """Which rank has a layer's gradients, no other knows: rank 0's first layer would meet rank 1's second."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(6, 6, bias=False) for _ in range(2 * world_size)))
    optimizer = OSS(model.parameters(), torch.optim.SGD, lr=0.1)
    ShardedDDP(model, optimizer)(torch.randn(3, 6)).square().sum().backward()
    own = next(layer for layer in model if layer.weight.grad is not None)
    with pytest.raises(ConfigurationError, match=r"norm of 1 of the 2 gradients .*OSS\.clip_grad_norm"):
        clip_grad.clip_grad_norm_(own.parameters(), MAX_NORM)


class Cast(nn.Linear):
    """Computes in its weight's dtype."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.to(self.weight.dtype)).to(x.dtype)


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize("strategy", ["sharded_ddp", "in_place"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@on_ranks(2, 3)
def test_ranks_whose_gradients_have_other_dtypes(
    rank: int, world_size: int, dtype: torch.dtype, strategy: str, norm_type: float
) -> None:
    """One rank's parameters are all of one dtype, another's of several: their norms meet in one."""

    def make() -> nn.Sequential:
        torch.manual_seed(1)
        wide, narrow = nn.Linear(5, 7), [Cast(7, 3).to(dtype), Cast(3, 4).to(dtype)]
        return nn.Sequential(wide, nn.Tanh(), narrow[0], nn.Tanh(), narrow[1])

    t = twins(rank, world_size, strategy, make=make)
    for step in range(2):
        t.zero_grad()
        t.backward(step)
        norm, truth = (
            clip_grad.clip_grad_norm_(m.parameters(), MAX_NORM, norm_type) for m in (t.model, t.plain)
        )
        assert norm.dtype is truth.dtype
        torch.testing.assert_close(norm, truth, rtol=1e-2 if dtype is torch.bfloat16 else 1e-5, atol=0)
        t.step()
    t.assert_equal(1e-2 if dtype is torch.bfloat16 else 1e-6)


class Scaled(nn.Linear):
    """Has one number of another dtype, which lies on one rank."""

    def __init__(self) -> None:
        super().__init__(7, 4)
        self.scale = nn.Parameter(torch.tensor([0.5], dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (super().forward(x) * self.scale).to(x.dtype)


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2, 3)
def test_ranks_that_have_nothing_of_a_dtype(rank: int, world_size: int, strategy: str) -> None:
    """torch takes the norms of each dtype together, also where a rank's gradients of one have no elements."""

    def make() -> nn.Sequential:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), Scaled())

    t = twins(rank, world_size, strategy, make=make)
    for step in range(2):
        t.zero_grad()
        t.backward(step)
        for model in (t.model, t.plain):
            clip_grad.clip_grad_norm_(model.parameters(), MAX_NORM, foreach=True)
        t.step()
    t.assert_equal()


@pytest.mark.parametrize(
    ("first", "dtypes"),
    [
        (ShardedDDP, (torch.bfloat16, torch.float32)),
        (ShardedDDP, (torch.float32, torch.float16)),
        (FSDP, (torch.bfloat16, torch.bfloat16)),
        (FSDP, (torch.bfloat16, torch.float32)),
        (ShardedDDP, (torch.float32, torch.float64)),
        (FSDP, (torch.float32, torch.float64)),
    ],
    ids=str,
)
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@on_ranks(2, 3)
def test_one_clip_of_two_modules_of_other_dtypes(
    rank: int, world_size: int, norm_type: float, first: Any, dtypes: Any
) -> None:
    """A rank that owns nothing of one sent its norm in the other one's dtype, and the process of another was ended."""
    torch.manual_seed(1)
    sizes = [[(5, 5)] * (world_size + 1), [(5, 7)]]  # every rank owns some of the first
    plain = [nn.Sequential(*[Cast(*s).to(d) for s in each]) for d, each in zip(dtypes, sizes, strict=True)]
    models = copy.deepcopy(plain)
    wrapped = [
        FSDP(m) if first is FSDP and k == 0 else ShardedDDP(m, OSS(m.parameters(), torch.optim.SGD, lr=0.1))
        for k, m in enumerate(models)
    ]

    for each, ranks in ((wrapped, [rank]), (plain, range(world_size))):
        losses = [m(torch.full((2, 5), 0.5 + r)).sum() for r in ranks for m in each]
        (torch.stack(losses).sum() / len(ranks)).backward()
    norms = [
        clip_grad.clip_grad_norm_([p for m in each for p in m.parameters()], 0.1, norm_type)
        for each in (wrapped, plain)
    ]
    torch.testing.assert_close(norms[0].double(), norms[1].double(), rtol=1e-2, atol=0)
    everybody = get_backend("gloo").group().all_gather_object(norms[0].item())
    assert everybody == pytest.approx(everybody[:1] * world_size, rel=1e-6)


# ------------ ``torch.amp.GradScaler`` where an overflow shows on one rank alone.
SCALE = 1024.0


def _overflow(rank: int, world_size: int, strategy: str, unscale: bool, options: dict[str, Any]) -> None:
    """The middle one of three steps overflows in one element, which one rank has."""
    t = twins(rank, world_size, strategy, torch.optim.AdamW, lr=0.01, **options)
    scalers = [torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=2) for _ in range(2)]
    for step in range(4):
        t.zero_grad()
        for s in scalers:
            s.scale(torch.ones(()))
        t.backward(step, scalers[0].get_scale())
        if step == 1:
            for model in (t.model, t.plain):
                last = [p for p in model.parameters() if p.grad is not None]
                if last and (model is t.plain or rank == world_size - 1):
                    last[-1].grad.view(-1)[0] = float("inf")
        for scaler, model, optimizer in zip(
            scalers, (t.model, t.plain), (t.optimizer, t.plain_optimizer), strict=True
        ):
            if unscale:
                scaler.unscale_(optimizer)
                clip_grad.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
        assert scalers[0].get_scale() == scalers[1].get_scale()
        t.assert_equal()
    assert scalers[1].get_scale() == SCALE


@pytest.mark.parametrize("world", WORLDS, ids=str)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("unscale", [False, True])
def test_an_overflow_on_one_rank(world: tuple[int, str], strategy: str, unscale: bool) -> None:
    run(world, _overflow, strategy, unscale, {})


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("unscale", [False, True])
def test_an_optimizer_that_skips_by_itself(strategy: str, unscale: bool) -> None:
    """Fused ones get the scale and the flag, and unscale in their kernel."""
    run((2, "gloo"), _overflow, strategy, unscale, {"fused": True})


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("kind", ["none", "another dtype", "none of a shard"])
@on_ranks(2, 3)
def test_ranks_that_scale_have_no_gradients_or_of_other_dtypes(
    rank: int, world_size: int, kind: str, unscale: bool
) -> None:
    """Found: torch's AssertionError on the rank without any, and two meetings on a rank of two dtypes."""
    model = nn.ModuleList(Cast(4, 4, False) for _ in range(world_size + 1 if kind == "another dtype" else 1))
    if kind == "another dtype":
        model[-1].to(torch.bfloat16)
    if kind == "none of a shard":
        model.append(Cast(4, 4, False))
        module = FSDP(model)
        optimizer: Any = torch.optim.SGD(module.parameters(), 0.1)
    else:
        optimizer = OSS(model.parameters(), torch.optim.SGD, lr=0.1)
        module = ShardedDDP(model, optimizer)
    model.forward = lambda x: sum(m(x).sum() for m in (model[:1] if len(model) == 2 else model))  # type: ignore[method-assign]
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    for step in range(3):
        optimizer.zero_grad()
        scaler.scale(module(torch.full((2, 4), float("inf" if step == 1 and rank == 0 else 1)))).backward()
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == (SCALE if step == 0 else SCALE / 2)
    assert all(torch.isfinite(v).all() for v in module.state_dict().values())


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(*GLOO)
def test_the_sharded_scaler(rank: int, world_size: int, strategy: str) -> None:
    """shardkit's own scaler decides as before, once."""
    t = twins(rank, world_size, strategy)
    scaler = ShardedGradScaler(SCALE)
    scaler.scale(torch.ones(()))
    t.backward(0, SCALE)
    if rank == world_size - 1:
        owned = [p for p in t.model.parameters() if p.grad is not None]
        owned[-1].grad.view(-1)[0] = float("nan")
    before = {k: v.clone() for k, v in t.model.state_dict().items()}
    scaler.step(t.optimizer)
    scaler.update()
    assert scaler.get_scale() == SCALE / 2
    for k, v in t.model.state_dict().items():
        assert torch.equal(v, before[k])


def _differs(rank: int, door: str, what: str) -> str:
    """Rank 1 clips to another norm in the second step, scales by another number, or loads old values alone."""
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    if door == "ShardedDDP":
        optimizer: Any = OSS(model.parameters(), torch.optim.SGD, lr=0.1)
        model = ShardedDDP(model, optimizer)
    else:
        model = through(door, model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    own = optimizer if door == "ShardedDDP" else sharding_of(model)
    scaler = ShardedGradScaler(init_scale=8.0 if what == "scale" and rank else 4.0, enabled=what == "scale")
    old = {name: value.clone() for name, value in model.state_dict().items()}
    try:
        for step in range(3):
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(2, 4)).sum()).backward()
            max_norm = 2.0 if rank == step == 1 else 1.0
            if what == "load" and rank == step == 1:
                model.load_state_dict(old)
            elif what == "own":
                (own.clip_grad_norm if door == "ShardedDDP" else own.clip_grad_norm_)(max_norm)
            scaler.step(optimizer)
    except (OutOfStepError, RankMismatchError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("what", "doors", "words"),
    [
        ("own", ("FSDP", "dtensors", "ShardedDDP"), "clipping to 2, norm 2"),
        ("scale", ("FSDP", "dtensors", "ShardedDDP"), "scale their losses by different numbers"),
        ("load", ("dtensors",), "a step after load_state_dict() of the model"),
    ],
)
def test_what_one_rank_does_otherwise_is_told_on_all(what: str, doors: tuple[str, ...], words: str) -> None:
    for door in doors:
        for end in run_once(2, "gloo", _differs, door, what):
            assert words in end, door
