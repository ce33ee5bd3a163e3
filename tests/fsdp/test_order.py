"""FSDP's units are gathered in one order on all ranks, and anew in each forward."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

from shardkit import FSDP, fully_shard, sharding_of
from shardkit.errors import LifecycleError
from tests.fsdp_models import WIDTH, batch, build
from tests.pools import rank_pool


class Cut(nn.Module):
    """Where told, backward ends behind the first two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.cut = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(torch.tanh(self.first(x)))
        return self.last(x.detach() if self.cut else x)


def _units(model: Cut) -> FSDP:
    model.first, model.second, model.last = FSDP(model.first), FSDP(model.second), FSDP(model.last)  # type: ignore[assignment]
    return FSDP(model)


def _same(sharded: nn.Module, plain: nn.Module) -> None:
    for (name, mine), truth in zip(sharded.state_dict().items(), plain.state_dict().values(), strict=True):
        torch.testing.assert_close(mine, truth, msg=lambda m, n=name: f"{n}: {m}")


def _cut_short(rank: int, world_size: int, cut_on: int) -> None:
    plain, model = build(Cut), _units(build(Cut))
    first, second = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, model))
    for step in range(3):
        xs = batch(step, world_size)
        losses = []
        for other in range(world_size):
            plain.cut = step > 0 and other == cut_on
            losses.append(plain(xs[other]).pow(2).mean())
        model.module.cut = step > 0 and rank == cut_on
        first.zero_grad()
        second.zero_grad()
        torch.stack(losses).mean().backward()
        model(xs[rank]).pow(2).mean().backward()
        first.step()
        second.step()
        _same(model, plain)


def test_units_that_backward_reaches_on_other_ranks_only() -> None:
    """A rank that stops earlier gathers along; else the others would wait for it."""
    for world_size in (2, 3):
        for cut_on in (0, world_size - 1):
            rank_pool(world_size).run(_cut_short, world_size, cut_on)


def _dropped(rank: int, world_size: int) -> None:
    plain, model = build(Cut), _units(build(Cut))
    first, second = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, model))
    for step in range(3):
        xs = batch(step, world_size)
        first.zero_grad()
        second.zero_grad()
        model(xs[rank]).pow(2).mean().backward()
        torch.stack([plain(x).pow(2).mean() for x in xs]).mean().backward()
        model(xs[rank])  # its graph is dropped: the unit called last is still gathered at the step
        first.step()
        second.step()
        for p in model.parameters():
            p.data.mul_(0.5)
        for p in plain.parameters():
            p.data.mul_(0.5)
        torch.testing.assert_close(model(xs[rank]), plain(xs[rank]))


def test_a_forward_without_backward_leaves_nothing_old() -> None:
    rank_pool(2).run(_dropped, 2)


class Switched(nn.Module):
    """Two layers, of which one is used now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = (nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.both = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.always(x) + self.sometimes(x) if self.both else self.always(x)


def _left_out(rank: int, world_size: int) -> None:
    plain, model = build(Switched), FSDP(build(Switched))
    options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.5}
    first, second = (torch.optim.SGD(m.parameters(), **options) for m in (plain, model))
    for step in range(3):
        plain.both = model.module.both = step != 1
        first.zero_grad()
        second.zero_grad()
        for micro in range(2):
            xs = batch(2 * step + micro, world_size)
            with model.no_sync() if micro == 0 else contextlib.nullcontext():
                model(xs[rank]).pow(2).mean().backward()
            torch.stack([plain(x).pow(2).mean() for x in xs]).mean().backward()
        first.step()
        second.step()
        _same(model, plain)


def test_a_layer_that_a_whole_step_of_several_batches_leaves_out() -> None:
    """While gradients wait under no_sync, zeros stand in their place, which are no gradient of that layer."""
    rank_pool(2).run(_left_out, 2)


def _stepped_too_early(rank: int, world_size: int) -> None:
    for shard in (FSDP, fully_shard):
        plain, model = build(Switched), build(Switched)
        model = shard(model)
        sharded = model if shard is FSDP else sharding_of(model)
        first, second = (torch.optim.AdamW(m.parameters(), lr=0.1) for m in (plain, model))
        xs = batch(0, world_size)
        with sharded.no_sync():
            model(xs[rank]).pow(2).mean().backward()
        for _ in range(2):
            with pytest.raises(LifecycleError, match="inside of no_sync"):
                second.step()
        model(xs[rank]).pow(2).mean().backward()  # adds to what was kept, and reduces both
        for _ in range(2):
            torch.stack([plain(x).pow(2).mean() for x in xs]).mean().backward()
        first.step()
        second.step()
        _same(model, plain)
        second.zero_grad()
        with sharded.no_sync():
            model(xs[rank]).pow(2).mean().backward()
        second.zero_grad()
        second.step()  # nothing to step with, and nothing left out
        _same(model, plain)


def test_a_step_that_leaves_out_what_no_sync_keeps_is_refused() -> None:
    """fairscale steps with nothing, silently: weight decay and counts of steps go on."""
    rank_pool(2).run(_stepped_too_early, 2)
