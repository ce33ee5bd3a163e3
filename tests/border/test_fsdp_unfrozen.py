"""Parameters that are frozen, or not used, in some steps: right, or warned of where an optimizer counts all steps."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from shardkit import FSDP, LifecycleError, ReducePolicy
from tests.beside import whole
from tests.border.strategies import heard
from tests.doors import DOORS, through
from tests.fsdp_models import WIDTH, build
from tests.pools import on_ranks


class Net(nn.Module):
    """Goes past its middle layer, if asked to."""

    skips = False

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        return self.last(x if self.skips else torch.tanh(self.middle(x)))


def _trained(
    model: nn.Module, optimizer: Any, by_freezing: bool, out: tuple[int, ...] = (0, 2)
) -> dict[str, torch.Tensor]:
    net: Any = getattr(model, "module", model)
    for step in range(5):
        is_out = step in out
        if by_freezing:
            net.middle.requires_grad_(not is_out)
        else:
            net.skips = is_out
        optimizer.zero_grad()
        x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(step))
        functional.mse_loss(model(x), torch.ones(3, WIDTH)).backward()
        optimizer.step()
    return model.state_dict()


def _unfrozen(door: Any, by_attribute: bool) -> dict[str, torch.Tensor]:
    net = build(Net)
    kept, model = [net.first.weight, net.middle.weight], door(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        if step < 2 and by_attribute:
            kept[step].requires_grad = False
        elif step < 2:
            kept[step].requires_grad_(False)
        if step:
            model.requires_grad_()
        optimizer.zero_grad()
        model(torch.ones(3, WIDTH)).square().sum().backward()
        optimizer.step()
    return whole(model.state_dict())


@pytest.mark.parametrize("by_attribute", [True, False])
@pytest.mark.parametrize("door", DOORS)
@on_ranks(1, 2, 3)
def test_all_is_unfrozen_after_a_parameter_that_was_kept(rank: int, door: str, by_attribute: bool) -> None:
    """What is listed looked trainable before, as it or other parts of it were; with a step between, and without."""
    plain = _unfrozen(lambda net: net, by_attribute)
    torch.testing.assert_close(_unfrozen(DOORS[door], by_attribute), plain)


class Scaled(Net):
    """Its middle layer is so small that one rank has all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.middle, self.last = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 5 * WIDTH)  # type: ignore[assignment]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        return self.last(x if self.skips else x * self.middle(x))[:, :WIDTH]


@on_ranks(2)
def test_all_ranks_say_it(rank: int) -> None:
    """Also those that have no part of it; as an error where sums have an order. Where one rank used it, none does."""
    for door in ("FSDP", "torch_fsdp"):
        for by_freezing in (False, True):
            model = DOORS[door](build(Scaled))
            with heard(logging.WARNING) as lines:
                _trained(model, torch.optim.AdamW(model.parameters()), by_freezing)
            (line,) = lines
            assert line.startswith(f"rank {rank}: parameter 'middle.")
    fixed = FSDP(build(Scaled), reduce=ReducePolicy(order="fixed"))
    with pytest.raises(LifecycleError, match=rf"rank {rank}: parameter 'middle\."):
        _trained(fixed, torch.optim.AdamW(fixed.parameters()), by_freezing=False)
    for user in range(2):
        model = FSDP(build(Scaled))
        with heard(logging.WARNING) as lines:
            _trained(model, torch.optim.AdamW(model.parameters()), False, () if rank == user else (0, 2))
        assert not lines


@on_ranks(2)
def test_members_without_gradients_in_some_steps(rank: int) -> None:
    def plain_sgd(params: Any) -> Any:
        return torch.optim.SGD(params, lr=0.1, weight_decay=0.1)

    with heard(logging.WARNING) as lines:
        for by_freezing, makes in (
            (False, (torch.optim.Adam, plain_sgd)),
            (True, (torch.optim.AdamW, torch.optim.RMSprop)),
        ):
            for make in makes:
                plain = build(Net)
                truth = _trained(plain, make(plain.parameters()), by_freezing)
                for door in ("FSDP", "nested", "unflattened", "torch_fsdp_orig", "fully_shard", "dtensors"):
                    model = (
                        through("FSDP", build(Net), "middle") if door == "nested" else DOORS[door](build(Net))
                    )
                    lines.clear()
                    found = _trained(model, make(model.parameters()), by_freezing)
                    if door == "FSDP" and make in (torch.optim.Adam, torch.optim.AdamW):
                        # each rank has a part of the middle layer, and says it once
                        (line,) = lines
                        assert line.startswith(f"rank {rank}: parameter 'middle.")
                        assert f"{make.__name__} counts the steps of the whole flat parameter" in line
                        assert "shardkit.fully_shard" in line
                        assert "flatten=False" in line
                        continue
                    assert not lines
                    for key, value in truth.items():
                        torch.testing.assert_close(whole(found)[key], value)
        # out for good
        model = FSDP(build(Net))
        inner: Any = model.module
        inner.skips = True
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(3):
            model(torch.ones(2, WIDTH)).sum().backward()
            optimizer.step()
        assert not lines
