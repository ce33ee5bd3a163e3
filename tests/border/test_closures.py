"""``optimizer.step(closure)``: gradients come within the step, and not every parameter gets one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from shardkit import FSDP, OSS
from shardkit.backend import get_backend
from tests.border.strategies import STRATEGIES, WORLDS, Twins, batch, needs_xla, run, twins


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


def _on_xla(rank: int, world_size: int, by_owners: bool) -> None:
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


@pytest.mark.xla
@needs_xla
@pytest.mark.parametrize("by_owners", [True, False])
def test_closures_on_xla(by_owners: bool) -> None:
    run((2, "xla"), _on_xla, by_owners)
