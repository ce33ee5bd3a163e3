"""Optimizers over what a strategy lists: which classes, made when, stepped how."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.functional import mse_loss
from torch.optim import Optimizer

import shardkit
from shardkit import FSDP, OSS, ShardedDDP, fully_shard
from shardkit.backend import get_backend
from shardkit.errors import ConfigurationError, LifecycleError
from shardkit.optimizers.elementwise import Verdict, judge
from tests.beside import assert_same
from tests.border.strategies import (
    GLOO,
    STRATEGIES,
    WORLDS,
    Twins,
    batch,
    heard,
    loss_of,
    make_model,
    needs_xla,
    run,
    twins,
    wrapped,
)
from tests.pools import on_ranks

BY_FSDP = [s for s in STRATEGIES if s != "sharded_ddp"]


class OneByOne(Optimizer):
    """Updates each parameter by itself."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def update(self, p: torch.Tensor, grad: torch.Tensor, lr: float) -> None:
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                self.update(p, p.grad, group["lr"])


class Lamb(OneByOne):
    """The rate of a parameter is that of its norm to its gradient's."""

    def update(self, p: torch.Tensor, grad: torch.Tensor, lr: float) -> None:
        p.add_(grad, alpha=-lr * float(p.norm() / grad.norm()))


class Orthogonal(OneByOne):
    """Matrices are treated as such, all else as by SGD."""

    def update(self, p: torch.Tensor, grad: torch.Tensor, lr: float) -> None:
        update = torch.linalg.qr(grad)[0] if p.ndim == 2 else grad
        p.sub_(update * lr)


class Blocks(OneByOne):
    """Gradients of large tensors are rounded in blocks, as 8-bit optimizers round their state."""

    def update(self, p: torch.Tensor, grad: torch.Tensor, lr: float) -> None:
        if grad.numel() >= 4096 and grad.numel() % 256 == 0:
            blocks = grad.reshape(-1, 256)
            size = blocks.abs().amax(1, keepdim=True) / 127
            grad = ((blocks / size).round() * size).view_as(grad)
        p.sub_(grad * lr)


class Noisy(OneByOne):
    """Element-wise but for noise."""

    def update(self, p: torch.Tensor, grad: torch.Tensor, lr: float) -> None:
        p.sub_((grad + torch.randn_like(p)) * lr)


class NoisyLamb(Lamb):
    """Draws numbers that change little."""

    def update(self, p: torch.Tensor, grad: torch.Tensor, lr: float) -> None:
        super().update(p, grad + 1e-3 * torch.randn_like(grad), lr)


class RightAngle(OneByOne):
    """Couples elements where gradients are at a right angle to a matrix, as AdamP."""

    def update(self, p: torch.Tensor, grad: torch.Tensor, lr: float) -> None:
        is_right = p.numel() > 300 and (p * grad).sum().abs() < 1e-3 * p.norm() * grad.norm()
        p.sub_((grad / grad.norm() if is_right else grad) * lr)


class Falling(OneByOne):
    """Couples elements where gradients fall suddenly, as AdaNorm; knows by their norm."""

    def update(self, p: torch.Tensor, grad: torch.Tensor, lr: float) -> None:
        before, norm = self.state[p].get("norm", 0.0), grad.norm()
        p.sub_(grad * lr * max(1.0, float(before / (100 * norm))))
        self.state[p]["norm"] = norm


class Ranked(OneByOne):
    """Projects matrices in groups with a rank, as GaLore."""

    def update(self, p: torch.Tensor, grad: torch.Tensor, lr: float) -> None:
        if p.ndim == 2 and any(p is q for g in self.param_groups if "rank" in g for q in g["params"]):
            grad = grad.mean(0, keepdim=True)
        p.sub_(grad * lr)


class Unknown(OneByOne):
    """Keeps a number that is none yet."""

    def update(self, p: torch.Tensor, grad: torch.Tensor, lr: float) -> None:
        self.state[p]["best"] = float("nan")
        p.sub_(grad * lr)


class Together(OneByOne):
    """Clips by the norm over all of its parameters, as LAMB does unless told otherwise."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        nn.utils.clip_grad_norm_([p for g in self.param_groups for p in g["params"]], 0.1)
        super().step(closure)

    def update(self, p: torch.Tensor, grad: torch.Tensor, lr: float) -> None:
        p.sub_(grad * lr)


class MyAdamW(torch.optim.AdamW):
    """As users derive it."""


class NeedsMore(torch.optim.SGD):
    """Can't be made from its options alone."""

    def __init__(self, params: Any, model: nn.Module, lr: float = 0.1) -> None:
        super().__init__(params, lr=lr)
        if not isinstance(model, nn.Module):
            raise TypeError("it wants the model")


# ------------------------------------------------------------------ which classes
@pytest.mark.parametrize(
    ("kind", "options", "verdict"),
    [
        (torch.optim.AdamW, {}, Verdict.ELEMENTWISE),
        (MyAdamW, {}, Verdict.ELEMENTWISE),
        (MyAdamW, {"lr": 0.0}, Verdict.ELEMENTWISE),
        (shardkit.optim.Adam, {}, Verdict.ELEMENTWISE),
        (torch.optim.Adafactor, {}, Verdict.COUPLED),
        (torch.optim.LBFGS, {}, Verdict.COUPLED),
        (Lamb, {}, Verdict.COUPLED),
        (Orthogonal, {"lr": 0.1}, Verdict.COUPLED),
        (Blocks, {"lr": 0.1}, Verdict.COUPLED),
        (Noisy, {"lr": 0.1}, Verdict.UNKNOWN),
        (NoisyLamb, {"lr": 0.1}, Verdict.COUPLED),
        (RightAngle, {"lr": 0.001}, Verdict.COUPLED),
        (Falling, {"lr": 0.1}, Verdict.COUPLED),
        (Ranked, {"lr": 0.1}, Verdict.ELEMENTWISE),
        (Unknown, {"lr": 0.1}, Verdict.ELEMENTWISE),
        (NeedsMore, {"model": nn.Identity()}, Verdict.UNKNOWN),
    ],
)
def test_classes_are_tried(kind: Callable[..., Optimizer], options: dict[str, Any], verdict: Verdict) -> None:
    param = nn.Parameter(torch.ones(3))
    assert judge(kind([param], **options)) is verdict
    if kind is Ranked:
        groups = [{"params": [nn.Parameter(param.data)], "lr": 0.2, "mask": torch.ones(k)} for k in (2, 3)]
        assert judge(kind(groups, **options)) is Verdict.ELEMENTWISE
        assert judge(kind([*groups, {"params": [param], "rank": 2}], **options)) is Verdict.COUPLED
    assert torch.equal(param, torch.ones(3))


@pytest.mark.parametrize(
    "kind", [c for c in vars(torch.optim).values() if isinstance(c, type) and issubclass(c, Optimizer)]
)
def test_every_optimizer_of_torch_is_judged_as_if_it_were_tried(kind: Any) -> None:
    if kind in (Optimizer, torch.optim.LBFGS, torch.optim.SparseAdam) or kind.__name__ == "Muon":
        return  # abstract, needs closures, sparse gradients, matrices only
    derived = type("Derived", (kind,), {})
    param = nn.Parameter(torch.ones(3))
    truth = Verdict.ELEMENTWISE if judge(kind([param])) is Verdict.ELEMENTWISE else Verdict.COUPLED
    assert judge(derived([param])) is truth


def _refused(rank: int, world_size: int, strategy: str, kind: Any) -> None:
    model = wrapped(strategy, make_model())
    optimizer = kind(model.parameters(), lr=0.1)
    loss_of(model, rank).backward()
    before = [p.detach().clone() for p in model.parameters()]
    for _ in range(2):  # not once only
        with pytest.raises(ConfigurationError, match=rf"{kind.__name__}.*AdamW.*OSS.*declare_elementwise"):
            optimizer.step(lambda: torch.zeros(()))
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("world", WORLDS, ids=str)
@pytest.mark.parametrize("kind", [torch.optim.Adafactor, torch.optim.LBFGS, Lamb, Falling])
def test_what_is_not_elementwise_is_refused_over_vectors(world: tuple[int, str], kind: Any) -> None:
    run(world, _refused, "units", kind)


def _whole(rank: int, world_size: int, strategy: str, kind: Any) -> None:
    t = twins(rank, world_size, strategy, kind, lr=0.1)
    for step in range(2):
        t.zero_grad()
        t.backward(step)
        t.step()
    t.assert_equal()


@pytest.mark.parametrize("kind", [torch.optim.Adafactor, Lamb])
def test_it_is_right_over_whole_parameters(kind: Any) -> None:
    run((3, "gloo"), _whole, "sharded_ddp", kind)
    run((1, "gloo"), _whole, "unflattened", kind)


@on_ranks(1, 2, (2, "simulated"))
def test_what_looks_at_all_parameters_is_refused_by_owners(rank: int, world_size: int) -> None:
    state = torch.get_rng_state()
    if world_size > 1:
        with pytest.raises(
            ConfigurationError, match=r"Together updates parameters together.*max_grad_norm=None"
        ):
            OSS(make_model().parameters(), Together, lr=0.1)
    else:
        OSS(make_model().parameters(), Together, lr=0.1)
    torch.set_rng_state(state)
    OSS(nn.Linear(2, 2).parameters(), Noisy, lr=0.1)
    mine = torch.rand(2)
    torch.set_rng_state(state)
    nn.Linear(2, 2)
    assert torch.equal(mine, torch.rand(2))  # trying draws nothing


class Around(Optimizer):
    """Goes around another optimizer, and is none that torch has initialized, as some packages' Lookahead."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.inner, self.defaults = optimizer, optimizer.defaults
        self.state, self.param_groups = optimizer.state, optimizer.param_groups
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
        self._patch_step_function()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()


@on_ranks(2)
def test_an_optimizer_around_another_is_declared(rank: int, world_size: int) -> None:
    t = twins(rank, world_size, "units")
    t.backward()
    declared = type("AroundToo", (Around,), {})
    with pytest.raises(ConfigurationError, match=r"another optimizer.*declare_elementwise\(AroundToo"):
        declared(t.optimizer).step()
    t.optimizer = shardkit.declare_elementwise(declared)(t.optimizer)
    t.step()
    t.assert_equal()


@pytest.mark.parametrize("strategy", [*STRATEGIES, "dtensors"])
@on_ranks(2)
def test_a_hook_after_the_step_that_raises(rank: int, world_size: int, strategy: str) -> None:
    """The step is through, and the program goes on: over DTensors gradients were never cleared again."""
    t = twins(rank, world_size, strategy)

    def raise_once(*_: object) -> None:
        handle.remove()
        raise KeyError("what a program does after its step")

    t.backward()
    t.step()
    handle = t.optimizer.register_step_post_hook(raise_once)
    t.backward()
    with pytest.raises(KeyError, match="after its step"):
        t.optimizer.step()
    t.plain_optimizer.step()
    for _ in range(2):
        t.optimizer.zero_grad()
        t.plain_optimizer.zero_grad()
        t.backward()
        t.step()
    t.assert_equal()


@on_ranks(2)
def test_what_cannot_be_tried_is_warned_of_once(rank: int, world_size: int) -> None:
    with heard() as messages:
        model = wrapped("fsdp", make_model())
        optimizer = NeedsMore(model.parameters(), model)
        for _ in range(2):
            loss_of(model, rank).backward()
            optimizer.step()
    assert [m for m in messages if "declare_elementwise(NeedsMore)" in m] == messages
    assert len(messages) == 1


def test_declared_classes_are_not_tried() -> None:
    declared = shardkit.declare_elementwise(type("Declared", (Lamb,), {}))
    assert judge(declared([nn.Parameter(torch.ones(3))])) is Verdict.ELEMENTWISE
    assert judge(Lamb([nn.Parameter(torch.ones(3))])) is Verdict.COUPLED


# ------------------------------------------------------------------ made when
@pytest.mark.parametrize("strategy", [*BY_FSDP, "all but a unit"])
@pytest.mark.parametrize("stepped_before", [False, True])
@on_ranks(*WORLDS)
def test_an_optimizer_made_before_wrapping(
    rank: int, world_size: int, strategy: str, stepped_before: bool
) -> None:
    """Also where a unit was wrapped already: the root's own parameters are lost. One made afterwards steps."""
    model = make_model()
    if strategy == "all but a unit":
        model[2] = FSDP(model[2])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    if stepped_before:
        loss_of(model, rank).backward()
        optimizer.step()
    before = str(optimizer.state_dict())
    sharded = wrapped("fsdp" if strategy == "all but a unit" else strategy, model)
    loss_of(sharded, rank).backward()
    words = (
        rf"{4 if strategy == 'all but a unit' else 5} of the 5 parameters of this AdamW were taken over by"
    )
    with pytest.raises(LifecycleError, match=words + r".*'0.bias'.*after wrapping"):
        optimizer.step()
    assert str(optimizer.state_dict()) == before
    after = torch.optim.AdamW(sharded.parameters(), lr=0.1)
    after.step()
    if strategy == "fsdp":
        after.add_param_group({"params": [sharded.module[4].weight]})  # type: ignore[index,union-attr]
        with pytest.raises(LifecycleError, match=r"\('4\.weight'\): it would never change"):
            after.step()


@on_ranks(*GLOO)
def test_sharding_twice_is_refused(rank: int, world_size: int) -> None:
    model = wrapped("units", make_model())
    with pytest.raises(ConfigurationError, match=r"shards.*AdamW\(model.parameters"):
        OSS(model.parameters(), torch.optim.AdamW, lr=0.1)
    linear = nn.Linear(3, 3)
    oss = OSS(linear.parameters(), torch.optim.AdamW, lr=0.1)
    with pytest.raises(ConfigurationError, match="shards"):
        oss.add_param_group({"params": list(model.parameters())})
    with pytest.raises(ConfigurationError, match="ShardedDDP can't wrap this module"):
        ShardedDDP(model, oss)
    for wrap in (FSDP, fully_shard, lambda params: ShardedDDP(params, oss)):
        with pytest.raises(ConfigurationError, match=r"got a (list|Parameter).*pass the model"):
            wrap([*linear.parameters()])
    for dtensors in (False, True):
        with pytest.raises(ConfigurationError, match="got a module twice"):
            fully_shard([linear, linear], dtensors=dtensors)
        shared = nn.Linear(3, 3)
        inside = nn.Sequential(nn.Tanh(), shared)
        fully_shard(inside, dtensors=dtensors)
        with pytest.raises(ConfigurationError, match=r"'0\.weight' is a shard already"):
            fully_shard(nn.Sequential(shared, inside), dtensors=dtensors)
        with pytest.raises(ConfigurationError, match="an empty list"):
            fully_shard([], dtensors=dtensors)
    for flatten in (True, False):
        shared = nn.Linear(3, 3)
        inside = FSDP(nn.Sequential(nn.Tanh(), shared), flatten=flatten)
        with pytest.raises(ConfigurationError, match=r"'0\.weight' is a shard already"):
            FSDP(nn.Sequential(shared, inside), flatten=flatten)


# ------------------------------------------------------------------ groups
@pytest.mark.parametrize("strategy", [*BY_FSDP, "torch_fsdp", "torch_fsdp_orig"])
@pytest.mark.parametrize(
    "how", ["by ndim", "by ndim, filtered", "by place", "an empty group for later", "no decay yet"]
)
@on_ranks(2)
def test_groups_by_dimension_are_warned_of(rank: int, world_size: int, strategy: str, how: str) -> None:
    with heard() as messages:
        model = wrapped(strategy, make_model())
        params = list(model.parameters())
        chosen: dict[str, Callable[[nn.Parameter], bool]] = {
            "by ndim": lambda p: p.ndim >= 2,
            "by ndim, filtered": lambda p: p.dim() >= 2,
            "by place": lambda p: p is params[0],
            "an empty group for later": lambda p: True,
            "no decay yet": lambda p: False,
        }
        decaying = [p for p in params if chosen[how](p)]
        others = [p for p in params if all(p is not d for d in decaying)]
        groups = [{"params": decaying, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        if how in ("by ndim, filtered", "no decay yet"):
            groups = [group for group in groups if group["params"]]
        optimizer = torch.optim.AdamW(groups, lr=0.1)
        for _ in range(2):
            loss_of(model, rank).backward()
            optimizer.step()
    # listed in place, rows have their parameter's dimensions
    is_wrong = strategy not in ("in_place", "unflattened") and how.startswith("by ndim")
    # parts are ordinary vectors, and nobody knows what was asked of them
    is_wrong = is_wrong or (strategy, how) == ("torch_fsdp_orig", "no decay yet")
    assert ["p.ndim" in m for m in messages] == [True] * is_wrong


def _adamw_by_dimension(params: Any, **options: Any) -> Optimizer:
    params = [*params]
    matrices, vectors = [p for p in params if p.ndim >= 2], [p for p in params if p.ndim < 2]
    assert len(matrices) == 3
    groups = [{"params": matrices, "weight_decay": 0.5}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, **options)


@on_ranks(*WORLDS)
def test_groups_by_dimension_in_place(rank: int, world_size: int) -> None:
    """Rows are listed with the dimensions of their parameters, so that the groups are those of one process."""
    both = twins(rank, world_size, "in_place", _adamw_by_dimension, lr=0.1)
    for step in range(3):
        both.zero_grad()
        both.backward(step)
        both.step()
    both.assert_equal(1e-5)


@on_ranks((2, "simulated"))
def test_muon_is_told_of_whole_parameters(rank: int) -> None:
    """torch's looks at shapes when it is made."""
    for strategy in ("torch_fsdp", "torch_fsdp_orig", *BY_FSDP):
        model = wrapped(strategy, make_model())
        with pytest.raises(ConfigurationError, match=r"WholeParameters\(model, Muon"):
            torch.optim.Muon(model.parameters())
    muon = torch.optim.Muon([p for p in model.parameters() if p.ndim == 2])  # rows, in place
    loss_of(model, rank).backward()
    with pytest.raises(ConfigurationError, match=r"WholeParameters\(model, Muon"):
        muon.step()
    with pytest.raises(ValueError, match="only supports 2D"):
        torch.optim.Muon(nn.Linear(2, 2).parameters())
    torch.optim.Muon(nn.Linear(2, 2, bias=False).parameters())


# ------------ ``optimizer.step(closure)``: gradients come within the step, and not every parameter gets one.
class Branches(nn.Sequential):
    """Which branches run is asked of a list; what lies in between has no gradient then."""

    def forward(self, x: torch.Tensor, branches: tuple[int, ...] = (0, 1, 2)) -> torch.Tensor:
        y = x
        for k in branches:
            y = torch.tanh(self[k](y))
        return y


def make_branches() -> Branches:
    torch.manual_seed(11)
    return Branches(nn.Linear(5, 5), nn.Linear(5, 5, bias=False), nn.Linear(5, 5))


class Twice(torch.optim.SGD):
    """Evaluates its closure twice in a step, with an update after each (as sharpness-aware optimizers do)."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for _ in range(2):
            with torch.enable_grad():
                loss = closure()
            super().step()
        return loss


def _closure(t: Twins, which: Any) -> tuple[Any, Any]:
    """Closures for both; ``which(step)`` says which branches run in which evaluation."""
    counts = [0, 0]

    def sharded() -> torch.Tensor:
        t.optimizer.zero_grad()
        loss = mse_loss(t.model(batch(t.rank, counts[0]), which(counts[0])), torch.ones(6, 5))
        counts[0] += 1
        loss.backward()
        return loss

    def plain() -> torch.Tensor:
        t.plain_optimizer.zero_grad()
        ranks = range(t.world_size)
        losses = [mse_loss(t.plain(batch(r, counts[1]), which(counts[1])), torch.ones(6, 5)) for r in ranks]
        counts[1] += 1
        loss = torch.stack(losses).mean()
        loss.backward()
        return loss

    return sharded, plain


def _alternating(step: int) -> tuple[int, ...]:
    return ((0, 2), (0, 1, 2), (1,), (0, 2))[step % 4]


def _step(
    rank: int, world_size: int, strategy: str, kind: Any, options: dict[str, Any], by_keyword: bool
) -> None:
    t = twins(rank, world_size, strategy, kind, make=make_branches, **options)
    sharded, plain = _closure(t, _alternating)
    for _ in range(4):
        if by_keyword:
            t.optimizer.step(closure=sharded)
            t.plain_optimizer.step(closure=plain)
        else:
            t.optimizer.step(sharded)
            t.plain_optimizer.step(plain)
        t.assert_equal()


@pytest.mark.parametrize("world", WORLDS, ids=str)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("by_keyword", [False, True])
def test_members_without_gradients_stay_as_they_are(
    world: tuple[int, str], strategy: str, by_keyword: bool
) -> None:
    options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}
    run(world, _step, strategy, torch.optim.SGD, options, by_keyword)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_closure_that_is_evaluated_twice(strategy: str) -> None:
    options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}
    run((2, "gloo"), _step, strategy, Twice, options, False)


@pytest.mark.xla
@needs_xla
@pytest.mark.parametrize("by_owners", [True, False])
@on_ranks((2, "xla"))
def test_closures_on_xla(rank: int, world_size: int, by_owners: bool) -> None:
    """Where all ranks run one program, OSS steps over flat segments, and FSDP gathers as data say."""
    backend = get_backend("xla")
    device = backend.device()
    plain, model = make_branches(), make_branches().to(device)
    options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}
    wrapped: nn.Module = model if by_owners else FSDP(model)
    if by_owners:
        optimizer: Any = OSS(model.parameters(), torch.optim.SGD, **options)
    else:
        optimizer = torch.optim.SGD(wrapped.parameters(), **options)
    truth = torch.optim.SGD(plain.parameters(), **options)
    for step in range(4):
        for m, o, where in ((wrapped, optimizer, device), (plain, truth, "cpu")):

            def closure(m: nn.Module = m, o: Any = o, where: Any = where, step: int = step) -> Any:
                o.zero_grad()
                x = batch(0, step).to(where)
                loss = mse_loss(m(x, _alternating(step)), torch.ones(6, 5, device=where))
                loss.backward()
                return loss

            o.step(closure)
        backend.mark_step()
    for name, value in wrapped.state_dict().items():
        torch.testing.assert_close(value.cpu(), plain.state_dict()[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("hooks", [True, False])
@pytest.mark.parametrize("strategy", [*STRATEGIES, "dtensors", "torch_fsdp", "torch_fsdp_orig"])
@on_ranks(*GLOO)
def test_optimizers_of_single_parameters_step_in_backward(
    rank: int, world_size: int, strategy: str, hooks: bool
) -> None:
    """What torch makes for each parameter trained nothing, in silence; with ShardedDDP each rank stepped by itself."""

    def shard(model: nn.Sequential) -> nn.Module:
        if strategy == "sharded_ddp":
            return ShardedDDP(model, OSS(model.parameters(), torch.optim.SGD, lr=0.1))
        return fully_shard(model, dtensors=True) if strategy == "dtensors" else wrapped(strategy, model)

    model, plain, before = shard(make_model()), make_model(), make_model()
    _apply_optimizer_in_backward(torch.optim.SGD, before.parameters(), {"lr": 0.1}, register_hook=hooks)
    with pytest.raises(ConfigurationError, match=r"call it after wrapping, .* ShardedDDP step its OSS"):
        loss_of(shard(before), rank)
    loss_of(model, rank).backward()  # a first step by hand
    model.zero_grad()
    _apply_optimizer_in_backward(torch.optim.AdamW, model.parameters(), {"lr": 0.1}, register_hook=hooks)
    if strategy == "sharded_ddp":
        with pytest.raises(ConfigurationError, match="ShardedDDP step its OSS after backward"):
            loss_of(model, rank)
        return
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1)
    for step in range(3):
        loss_of(model, rank, step).backward()
        assert all(p.grad is None for p in model.parameters())
        optimizer.zero_grad()
        torch.stack([loss_of(plain, r, step) for r in range(world_size)]).mean().backward()
        optimizer.step()
    assert_same(model, plain)
    copied = copy.deepcopy(model)  # which has no optimizers, though torch's copies of DTensors note some
    loss_of(copied, rank).backward()
    assert any(p.grad is not None for p in copied.parameters())
    assert_same(model, plain)
