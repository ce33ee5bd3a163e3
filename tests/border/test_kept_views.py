"""What a forward leaves behind: views of parameters, and units that stay gathered for backward."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shardkit import FSDP, ReshardPolicy
from shardkit.errors import LifecycleError
from tests.fsdp_models import batch, build
from tests.pools import rank_pool

WIDTH = 6

VIEWS: dict[str, Callable[[nn.Parameter], Any]] = {
    "t": lambda w: w.t(),
    "detach": lambda w: w.detach(),
    "data": lambda w: w.data,
    "chunk": lambda w: w.chunk(2)[0],
    "in a list": lambda w: [{"w": w.view(-1)}],
    "parameter": lambda w: [{"w": nn.Parameter(w.detach())}],
}


class Keeping(nn.Module):
    """Keeps a view of its weight, or only uses one."""

    def __init__(self, view: Callable[[nn.Parameter], Any] | None = None) -> None:
        super().__init__()
        self.linear, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.view, self.kept = view, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.view is not None:
            self.kept = self.view(self.linear.weight)
        else:
            x = x @ self.linear.weight.t()
        return self.down(self.linear(x))


def _kept(module: Keeping) -> torch.Tensor:
    found: Any = module.kept
    return found[0]["w"] if isinstance(found, list) else found  # type: ignore[no-any-return]


def _reads(rank: int, world: int, name: str) -> None:
    """Refused by name after forward, after backward and after forwards without gradients; right within forward."""
    plain, inner = build(Keeping), build(Keeping)
    inner.view = plain.view = VIEWS[name]
    model = FSDP(nn.Sequential(FSDP(inner), nn.Linear(3, 3)))
    x = batch(0, 1)[0]
    first, second = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain))
    for step in range(3):
        with torch.set_grad_enabled(step < 2):
            y = model(x)
        plain(x)
        if world > 1:
            view = _kept(inner)
            for read in (
                lambda v: v + 0,
                lambda v: v.sum(),
                lambda v: v.tolist(),
                lambda v: v.numpy(),
            ):
                with pytest.raises(
                    LifecycleError, match=r"a view of parameter '0\.linear\.weight' that was kept"
                ):
                    read(view)
            assert view.shape == _kept(plain).shape
        else:
            assert torch.equal(_kept(inner), _kept(plain))
        if step < 2:
            y.sum().backward()
        if world > 1:
            with pytest.raises(LifecycleError, match=f"rank {rank}: .* kept"):
                _kept(inner) * 2
    first.step()
    second.zero_grad()
    if world > 1:
        # the next forward finds it alive, if it keeps it
        seen: list[torch.Tensor] = []
        inner.view = None
        keep = inner.kept
        inner.linear.register_forward_hook(lambda m, i, o: seen.append(_kept(inner).clone()))
        model(x)
        assert inner.kept is keep
        with model.summon_full_params():
            truth = VIEWS[name](inner.linear.weight)
            truth = truth[0]["w"] if isinstance(truth, list) else truth
            assert torch.equal(seen[0], truth)


def _all_read(rank: int, world: int) -> None:
    for name in VIEWS:
        _reads(rank, world, name)


@pytest.mark.parametrize(("world", "backend"), [(1, "gloo"), (2, "gloo"), (2, "simulated")])
def test_views_that_are_kept(world: int, backend: str) -> None:
    rank_pool(world, backend).run(_all_read, world)


def _by_a_hook(rank: int) -> None:
    """Kept by a hook, long ago; what autograd alone keeps is no concern."""
    inner = build(Keeping)
    model = FSDP(nn.Sequential(FSDP(inner), nn.Linear(3, 3)))
    x = batch(0, 1)[0]
    for _ in range(2):
        model(x).sum().backward()
    handle = inner.register_forward_hook(lambda m, i, o: setattr(m, "kept", m.linear.weight.data))
    with torch.no_grad():
        model(x)
    handle.remove()
    for _ in range(2):
        model(x).sum().backward()
        with pytest.raises(LifecycleError, match="Keep a clone"):
            _kept(inner).norm()
    with pytest.raises(LifecycleError, match="a view of parameter"):
        copy.deepcopy(inner.kept)


def test_views_that_hooks_keep() -> None:
    rank_pool(2).run(_by_a_hook)


def _stays(rank: int, world: int) -> None:
    """Units that stay gathered for a backward that does not come: the next forward has the new values."""
    for flatten in (True, False):
        for reshard in (ReshardPolicy(), ReshardPolicy(after_forward=False), ReshardPolicy(root=False)):
            plain, model = build(Keeping), build(Keeping)
            model.linear = FSDP(model.linear, flatten=flatten, reshard=reshard)
            model.view = plain.view = lambda w: None  # type: ignore[assignment]
            model = FSDP(model, flatten=flatten, reshard=reshard)
            both = [(m, torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9)) for m in (plain, model)]
            for step in range(2):
                for m, optimizer in both:
                    m.zero_grad()
                    m(batch(step, 1)[0]).pow(2).sum().backward()
                    m(batch(step, 1)[0])
                    optimizer.step()
                if world > 1:
                    down = model.module.down
                    for use in (lambda d=down: d.weight.sum(), lambda d=down: d.weight.data.zero_()):
                        with pytest.raises(LifecycleError, match=r"parameter 'down\.weight'"):
                            use()
                for use in (lambda m: m(batch(7, 1)[0]), lambda m: m.linear(batch(7, 1)[0])):
                    torch.testing.assert_close(use(model), use(plain), rtol=0, atol=1e-6)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_units_that_stay_gathered_without_a_backward(world: int) -> None:
    rank_pool(world).run(_stays, world)
