"""Gathered parameters are copies: writes to them, and steps between forward and backward, are never lost silently."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from shardkit import FSDP, OSS, ReshardPolicy, ShardedDDP, fully_shard, sharding_of
from shardkit.backend import get_backend
from shardkit.errors import ConfigurationError, LifecycleError
from shardkit.policy import PrecisionPolicy
from tests.beside import batch
from tests.border.strategies import needs_xla
from tests.doors import through
from tests.fsdp_models import WIDTH, build
from tests.pools import on_ranks


def _set_data(weight: nn.Parameter) -> None:
    weight.data = weight.data / 2


WAYS: dict[str, Callable[[nn.Parameter], object]] = {
    "in place": lambda w: w.clamp_(-0.1, 0.1),
    "data": lambda w: w.data.clamp_(-0.1, 0.1),
    "a part of the data": lambda w: w.data[1].zero_(),
    "other data": _set_data,
}


class Clamping(nn.Linear):
    """Changes its weight in forward, if asked to."""

    clamps = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.clamps:
            with torch.no_grad():
                WAYS[self.clamps](self.weight)
        return super().forward(x) + self.weight.data.mean()


class Net(nn.Module):
    """The middle layer is checkpointed, if asked for."""

    checkpoints = False

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.middle = Clamping(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        x = checkpoint(self.middle, x, use_reentrant=False) if self.checkpoints else self.middle(x)
        return self.last(torch.tanh(x))


def _clamp(model: nn.Module, value: str) -> None:
    for m in model.modules():
        if isinstance(m, Clamping):
            m.clamps = value


def _wrapped(nested: bool, **options: Any) -> FSDP:
    return through("FSDP", build(Net), *["middle"] * nested, **options)  # type: ignore[no-any-return]


def _loss(model: nn.Module, rank: int = 0) -> torch.Tensor:
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(rank))
    return functional.mse_loss(model(x), torch.ones(3, WIDTH))


def _written_and(ending: str, model: FSDP) -> None:
    """Raises in forward where the unit is given back, or locked, after it."""
    loss = _loss(model)
    if ending == "backward":
        loss.backward()
    elif ending == "forward":
        _loss(model)
    else:
        model.state_dict()


@on_ranks(2)
def test_writes_in_forward_are_refused(rank: int) -> None:
    endings = [(ending, "in place") for ending in ("backward", "forward", "state_dict")]
    for nested in (False, True):
        for ending, way in (*endings, *[("backward", way) for way in WAYS]):
            model = _wrapped(nested)
            before = {k: v.clone() for k, v in model.state_dict().items()}
            _clamp(model, way)
            with pytest.raises(
                LifecycleError, match=r"'middle\.weight' was written to .* summon_full_params\(\)"
            ):
                _written_and(ending, model)
            _clamp(model, "")
            _loss(model).backward()  # it is said once
            for key, value in model.state_dict().items():
                assert torch.equal(value, before[key])
    # between forward and backward, while it is gathered
    model = _wrapped(False)
    loss = _loss(model)
    loss.backward()
    loss = _loss(model)
    with (
        torch.no_grad(),
        pytest.raises(LifecycleError, match=r"zero_ needs the values of parameter 'first\.weight'"),
    ):
        model.module.first.weight.zero_()
    loss.backward()
    # inside of summon_full_params it is what it is in one process
    plain, model = build(Net), _wrapped(True)
    with torch.no_grad(), model.summon_full_params():
        model.module.middle.module.weight.zero_()
        plain.middle.weight.zero_()
    for m in (plain, model):
        _loss(m).backward()
    with torch.no_grad():
        assert torch.equal(_loss(model), _loss(plain))


@on_ranks(1)
def test_writes_of_one_rank_stay(rank: int) -> None:
    """One rank: nothing is given back, so that writes stay, unless it computes in another dtype."""
    plain, model = build(Net), _wrapped(True)
    for m in (plain, model):
        optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
        _clamp(m, "in place")
        for _ in range(2):
            optimizer.zero_grad()
            _loss(m).backward()
            optimizer.step()
    for key, value in plain.state_dict().items():
        assert torch.equal(model.state_dict()[key], value)
    x = torch.ones(2, WIDTH, requires_grad=True)
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    slope.pow(2).sum().backward()
    embedding = FSDP(nn.Embedding(4, 3, max_norm=0.1))
    assert embedding(torch.arange(4)).norm(dim=1).max() < 0.11
    model = _wrapped(False, precision=PrecisionPolicy(compute=torch.bfloat16))
    _clamp(model, "in place")
    with pytest.raises(LifecycleError, match=r"'middle\.weight' was written to"):
        _loss(model).backward()


@on_ranks(2)
def test_embeddings_that_renormalise_are_refused(rank: int) -> None:
    for layer in (nn.Embedding, nn.EmbeddingBag):
        for wrap in (FSDP, fully_shard, lambda m: ShardedDDP(m, OSS(m.parameters(), lr=0.1))):
            inner = nn.Sequential(nn.Identity(), layer(4, 3, max_norm=0.1))
            refused = rf"rank {rank}: '1' is an {layer.__name__} with max_norm=0.1"
            with pytest.raises(ConfigurationError, match=refused):
                wrap(inner)
            setattr(inner[1], "max_norm", None)  # noqa: B010
            wrap(inner)


class Smooth(nn.Sequential):
    """Its second derivatives are no zeros; one layer is frozen, another one recomputed."""

    def __init__(self) -> None:
        super().__init__(
            nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 5), nn.LayerNorm(5), nn.Linear(5, 5), nn.Tanh()
        )
        self.append(nn.Linear(5, 1))
        self[2].bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for k, layer in enumerate(self):
            x = checkpoint(layer, x, use_reentrant=False) if k == 4 else layer(x)
        return x


def _slope(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    x = x.detach().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return slope


def _penalty(model: nn.Module, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (_slope(model, b).norm(dim=1) - 1).square().mean() + model(a).mean()  # a forward between


def _forces(model: nn.Module, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (_slope(model, a) - b).square().mean()


def _third(model: nn.Module, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a.requires_grad_()
    slope = torch.autograd.grad(model(a).sum(), a, create_graph=True)[0]
    return torch.autograd.grad(slope.square().sum(), a, create_graph=True)[0].square().mean()


def _not_gone_through(model: nn.Module, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    _slope(model, a)
    return model(b).square().mean()


def _sharded(door: str, **options: Any) -> nn.Module:
    return through(door, build(Smooth), "2", "3", "4", **options)  # type: ignore[no-any-return]


class Watching(TorchDispatchMode):
    """Sees operations, as counters and profilers do."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@on_ranks(*[(ranks, "simulated") for ranks in (1, 2, 3)])
def test_graphs_of_gradients_of_inputs(rank: int, world_size: int) -> None:
    for door, watching in itertools.product(("FSDP", "fully_shard"), (contextlib.nullcontext, Watching)):
        for loss in (_penalty, _forces, _third, _not_gone_through):
            models = build(Smooth), _sharded(door, reshard=ReshardPolicy(root=True))
            optimizers = [
                torch.optim.Adam([p for p in m.parameters() if p.requires_grad], lr=0.01) for m in models
            ]
            for step in range(0, 6, 2):
                for optimizer in optimizers:
                    optimizer.zero_grad()
                for r in range(world_size):
                    (loss(models[0], batch(r, step, 4, 3), batch(r, step + 1, 4, 3)) / world_size).backward()
                with watching():
                    loss(models[1], batch(rank, step, 4, 3), batch(rank, step + 1, 4, 3)).backward()
                for optimizer in optimizers:
                    optimizer.step()
            torch.testing.assert_close(dict(models[1].state_dict()), dict(models[0].state_dict()))


@on_ranks((2, "simulated"))
def test_graphs_that_are_too_old_or_of_parameters(rank: int, world_size: int) -> None:
    for door in ("FSDP", "fully_shard"):
        model, x = _sharded(door), batch(rank, 0, 4, 3)
        words = rf"rank {rank}: a backward with create_graph=True that gives gradients of .* parameters"
        state = sharding_of(model)
        for context in (contextlib.nullcontext(), state.no_sync()):
            with context, pytest.raises(LifecycleError, match=words):
                model(x).sum().backward(create_graph=True)
        assert all(p.grad is None for p in model.parameters())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for between, error in (
            (lambda: None, LifecycleError),
            (lambda model=model, x=x: model(x), RuntimeError),
        ):
            slope = _slope(model, x)
            for p in model.parameters():
                p.grad = torch.ones_like(p)
            optimizer.step()
            between()
            with pytest.raises(error, match=r"before the last change|modified by an inplace operation"):
                slope.square().sum().backward()
        plain = build(Smooth)
        plain.load_state_dict(model.state_dict())
        torch.testing.assert_close(model(x), plain(x))


def _train(plain: nn.Module, model: FSDP, steps: tuple[str, ...]) -> None:
    """The same in both, ends in the same; same data on all ranks."""
    for m in (plain, model):
        optimizer, losses = torch.optim.AdamW(m.parameters(), lr=0.01), []
        for k, step in enumerate(steps):
            if step == "f":
                losses.append(_loss(m, k))
            elif step == "b":
                losses.pop(0).backward()
            elif step == "drop":
                losses.clear()
            elif step == "freeze":  # autograd gives it nothing from here on
                inner: Any = m.module if isinstance(m, FSDP) else m
                inner.middle.requires_grad_(False)
            elif step == "local":
                with m.no_sync() if isinstance(m, FSDP) else torch.enable_grad():
                    losses.pop(0).backward()
            else:
                optimizer.step()
                optimizer.zero_grad()
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[key], value)


@on_ranks(2)
def test_step_between_forward_and_backward_is_refused(rank: int) -> None:
    for nested in (False, True):
        for steps in (("f", "b", "f", "s", "b"), ("f", "b", "f", "s", "f", "b"), ("f", "f", "b", "s", "b")):
            for model, kind in ((build(Net), RuntimeError), (_wrapped(nested), LifecycleError)):
                with pytest.raises(kind, match=r"inplace operation|backward before the optimizer's step"):
                    _train(model, model, steps)  # type: ignore[arg-type]
    legal: tuple[tuple[str, ...], ...] = (
        ("f", "b", "s", "f", "f", "b", "b", "s"),
        ("f", "b", "f", "s", "drop", "f", "b", "s"),
        ("f", "b", "s", "f", "freeze", "b", "s", "f", "b", "s"),
        ("f", "local", "f", "b", "s", "f", "f", "local", "b", "s"),
    )
    for allowed in legal:
        for checkpoints in (False, True)[
            : 1 if "freeze" in allowed else 2
        ]:  # else it would be frozen when recomputed
            plain, model = build(Net), _wrapped(True)
            plain.checkpoints = checkpoints
            inner: Any = model.module
            inner.checkpoints = checkpoints
            _train(plain, model, allowed)


@pytest.mark.xla
@needs_xla
@on_ranks((2, "xla"))
def test_writes_and_freezing_on_xla(rank: int) -> None:
    device = get_backend("xla").device()
    model = FSDP(build(Net).to(device))
    for way in ("data", "other data"):
        _clamp(model, way)
        with pytest.raises(LifecycleError, match=r"'middle\.weight' was written to"):
            model(torch.ones(3, WIDTH, device=device)).sum().backward()
        _clamp(model, "")
    model.zero_grad()
    loss = model(torch.ones(3, WIDTH, device=device)).sum()
    for p in model.parameters():
        p.requires_grad_(False)
    loss.backward()
    assert [p.grad for p in model.parameters()] == [None]
