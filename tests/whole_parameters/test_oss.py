"""OSS and ShardedDDP take the same optimizers: the numbers of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shardkit import OSS, ShardedDDP
from tests.pools import rank_pool
from tests.whole_parameters.nets import difference, eager, net, train
from tests.whole_parameters.test_exact import LARGE, SPECS

TAKEN = [name for name in SPECS if name not in ("Muon", "LAMB, norm of all", "4 bits")]


def sharded(rank: int, world_size: int, spec: Any, options: dict[str, Any]) -> Any:
    model = net(**({"width": 64} if options is LARGE or "width" in options else {}))
    optimizer = OSS(model.parameters(), optim=spec[0], **spec[1])
    wrapped = ShardedDDP(model, optimizer)
    train(wrapped, optimizer, rank, world_size, **options)
    optimizer.consolidate_state_dict(-1)
    return model.state_dict(), optimizer.state_dict()


@pytest.mark.filterwarnings("ignore")  # of packages
@pytest.mark.parametrize("name", TAKEN)
def test_numbers_of_one_process(name: str) -> None:
    make, options = SPECS[name]
    spec = make()
    with eager():
        plain = net(**({"width": 64} if options is LARGE else {}))
        optimizer = spec[0](plain.parameters(), **spec[1])
        train(plain, optimizer, **options)
        (values, state), *_ = rank_pool(3, "simulated").run(sharded, 3, spec, options)
    assert difference(values, plain.state_dict()) <= 1e-6
    assert difference(state["state"], optimizer.state_dict()["state"]) <= 1e-5
    ours, theirs = state["param_groups"][0], optimizer.state_dict()["param_groups"][0]
    assert {k: str(v) for k, v in ours.items()} == {k: str(v) for k, v in theirs.items()}


class ByName(torch.optim.SGD):
    """In the manner of some Muons: what it does with a parameter depends on its name and dimension, when it steps."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for name, p in zip(group["param_names"], group["params"], strict=True):
                if p.grad is None:
                    continue
                is_hidden = p.ndim == 2 and not name.startswith("4")
                p.sub_(p.grad * (group["lr"] * (p.norm() if is_hidden else 1.0)))
                p.mul_(1 - group["weight_decay"])


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    named = list(model.named_parameters())
    matrices = [(n, p) for n, p in named if p.ndim >= 2]
    return [
        {"params": matrices, "weight_decay": 0.1},
        {"params": [(n, p) for n, p in named if p.ndim < 2], "weight_decay": 0.0},
    ]


def by_name(rank: int, world_size: int) -> dict[str, Any]:
    model = net()
    optimizer = OSS(groups_of(model), optim=ByName, lr=0.1)
    wrapped = ShardedDDP(model, optimizer)
    train(wrapped, optimizer, rank, world_size, steps=range(2))
    model[0].weight.requires_grad_(False)
    train(wrapped, optimizer, rank, world_size, steps=range(2, 4))
    return model.state_dict()


def test_groups_by_name_and_dimension() -> None:
    plain = net()
    optimizer = ByName(groups_of(plain), lr=0.1)
    train(plain, optimizer, steps=range(2))
    plain[0].weight.requires_grad_(False)
    train(plain, optimizer, steps=range(2, 4))
    for world_size in (2, 4):
        for values in rank_pool(world_size, "simulated").run(by_name, world_size):
            assert difference(values, plain.state_dict()) <= 1e-9


def with_muon(rank: int, world_size: int) -> dict[str, Any]:
    model = net()
    named = [(n, p) for n, p in model.named_parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if p.ndim != 2]
    muon = OSS([{"params": named[:1]}, {"params": named[1:], "lr": 0.1}], optim=torch.optim.Muon, lr=0.02)
    others = OSS(rest, optim=torch.optim.AdamW, lr=0.01)
    wrapped = ShardedDDP(model, [muon, others])
    for step in range(3):
        train(wrapped, muon, rank, world_size, steps=range(step, step + 1), before_step=others.step)
        others.zero_grad()
    return model.state_dict()


def test_muon_with_named_groups() -> None:
    plain = net()
    named = [(n, p) for n, p in plain.named_parameters() if p.ndim == 2]
    muon = torch.optim.Muon([{"params": named[:1]}, {"params": named[1:], "lr": 0.1}], lr=0.02)
    others = torch.optim.AdamW([p for p in plain.parameters() if p.ndim != 2], lr=0.01)
    for step in range(3):
        train(plain, muon, steps=range(step, step + 1), before_step=others.step)
        others.zero_grad()
    for values in rank_pool(3, "simulated").run(with_muon, 3):
        assert difference(values, plain.state_dict()) <= 1e-9
