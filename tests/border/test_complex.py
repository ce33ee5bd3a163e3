"""Complex parameters train as in one process: gathered, reduced (sum, then divide), clipped, saved."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad

from shardkit import FSDP, OSS, PrecisionPolicy, ReducePolicy, ShardedDDP
from tests.beside import assert_same
from tests.border.strategies import WORLDS
from tests.doors import through
from tests.fsdp_models import build
from tests.pools import on_ranks


class Net(nn.Module):
    """Complex layers, one parameter that the odd ranks do not use, and a real head."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 5, dtype=torch.complex64)
        self.scale = nn.Parameter(torch.randn(5, dtype=torch.complex64))
        self.head = nn.Linear(5, 2)

    def forward(self, x: torch.Tensor, scaled: bool) -> torch.Tensor:
        y = self.first(x.to(torch.complex64))
        return self.head((y * self.scale if scaled else y).abs().to(self.head.weight.dtype))


def _states(model: FSDP, optimizer: Any, plain: Net, truth: Any) -> None:
    with model.summon_full_params():
        for (_, mine), (_, wanted) in zip(
            sorted(_clean(model)), sorted(plain.named_parameters()), strict=True
        ):
            torch.testing.assert_close(mine, wanted)
    model.load_state_dict(plain.state_dict())
    model.load_local_state_dict(copy.deepcopy(model.local_state_dict()))
    assert_same(model, plain)
    full = model.gather_full_optim_state_dict(optimizer)
    full = model._state.group.channel("control").broadcast_object(full, 0, label="state")
    by_id = [plain.scale, *plain.head.parameters(), *plain.first.parameters()]
    for i, p in enumerate(by_id):
        torch.testing.assert_close(full["state"][i]["exp_avg"], truth.state[p]["exp_avg"])
    optimizer.load_state_dict(model.get_shard_from_optim_state_dict(full))


def _clean(model: FSDP) -> list[tuple[str, nn.Parameter]]:
    drop = ("_fsdp_wrapped_module", "_fpw_module")
    return [(".".join(p for p in n.split(".") if p not in drop), v) for n, v in model.named_parameters()]


@pytest.mark.parametrize("kind", ["flat", "unflattened", "predivide", "fixed", "ddp"])
@on_ranks(*WORLDS)
def test_training(rank: int, world_size: int, kind: str) -> None:
    plain, model = build(Net), build(Net)
    first = torch.optim.Adam(plain.parameters(), lr=0.05)
    wrapped: Any
    second: Any
    if kind == "ddp":
        second = OSS(model.parameters(), torch.optim.Adam, lr=0.05)
        wrapped = ShardedDDP(model, second)
    else:
        options: dict[str, Any] = {
            "flat": {},
            "unflattened": {"flatten": False},
            "predivide": {"reduce": ReducePolicy(predivide=3.0)},
            "fixed": {"reduce": ReducePolicy(order="fixed")},
        }[kind]
        wrapped = through("FSDP", model, "first", **options)
        second = torch.optim.Adam(wrapped.parameters(), lr=0.05)
    for step in range(4):
        xs = torch.randn(world_size, 4, 3, generator=torch.Generator().manual_seed(step))
        first.zero_grad()
        second.zero_grad()
        uses = [r % 2 == 0 and step != 2 for r in range(world_size)]
        torch.stack(
            [plain(x, used).pow(2).mean() for x, used in zip(xs, uses, strict=True)]
        ).mean().backward()
        wrapped(xs[rank], uses[rank]).pow(2).mean().backward()
        # from where it is defined: torch_xla puts one in its place that knows no complex gradients
        norms = [clip_grad.clip_grad_norm_(plain.parameters(), 0.3)]
        norms.append(second.clip_grad_norm(0.3) if kind == "ddp" else wrapped.clip_grad_norm_(0.3))
        torch.testing.assert_close(norms[1], norms[0])
        first.step()
        second.step()
    if kind == "ddp":
        return assert_same(model, plain)
    assert_same(wrapped, plain)
    _states(wrapped, second, plain, first)


class Counts(Net):
    """Has integers among its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.arange(300), requires_grad=False)
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor, scaled: bool) -> torch.Tensor:
        self.seen = [p.dtype for p in (self.head.weight, self.scale, self.table)]
        return super().forward(x + self.table[299] - 299, scaled)


@on_ranks(1, 2, 3)
def test_mixed_precision(rank: int) -> None:
    """Complex numbers and integers are not computed in half."""
    model = FSDP(build(Counts), precision=PrecisionPolicy(compute=torch.bfloat16))
    model(torch.ones(2, 3), True).sum().backward()
    assert model.module.seen == [torch.bfloat16, torch.complex64, torch.int64]
    assert [p.grad.dtype for p in model.parameters() if p.grad is not None] == [
        torch.complex64,
        torch.float32,
    ]
    assert model.state_dict()["table"].tolist() == list(range(300))
