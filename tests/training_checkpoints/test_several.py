"""Several optimizers and schedulers in one checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

import shardkit
from tests.pools import on_ranks
from tests.training_checkpoints.programs import build, content, step


class _Adversaries:
    """A generator and a discriminator, each with an optimizer and a scheduler."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        both = {"generator": nn.Linear(3, 4), "discriminator": nn.Linear(4, 1)}
        self.models = nn.ModuleDict({k: shardkit.fully_shard(m) for k, m in both.items()})
        make: Any = {"generator": torch.optim.AdamW, "discriminator": torch.optim.SGD}
        self.optimizers = [make[k](m.parameters(), lr=0.1) for k, m in self.models.items()]
        self.schedulers = [torch.optim.lr_scheduler.StepLR(o, 2) for o in self.optimizers]
        self.parts: dict[str, Any] = {
            "model": self.models, "optimizer": self.optimizers, "scheduler": self.schedulers
        }  # fmt: skip

    def step(self, number: int) -> float:
        noise = torch.randn(5, 3, generator=torch.Generator().manual_seed(number))
        made = self.models["generator"](noise)
        loss = self.models["discriminator"](made).square().mean() + made.square().mean()
        loss.backward()
        for optimizer, scheduler in zip(self.optimizers, self.schedulers, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        return float(loss)


@on_ranks(2)
def test_adversaries_go_on_to_the_bit(rank: int, tmp_path: Path) -> None:
    first = _Adversaries()
    for k in range(3):
        first.step(k)
    shardkit.save(tmp_path, step=3, **first.parts)
    expected = [first.step(k) for k in range(3, 6)]
    again = _Adversaries()
    assert shardkit.restore(tmp_path, **again.parts).step == 3
    assert [again.step(k) for k in range(3, 6)] == expected
    one = _Adversaries()
    with pytest.raises(shardkit.ConfigurationError, match="has 1 param groups, and 2 in"):
        shardkit.restore(tmp_path, model=one.models, optimizer=one.optimizers[:1])
    before = one.schedulers[0].state_dict()
    for given, said in ((one.schedulers[:1], "a list of 1"), (one.schedulers[0], "one")):
        with pytest.raises(shardkit.ConfigurationError, match=f"scheduler= is {said}, .* with a list of 2"):
            shardkit.restore(tmp_path, model=one.models, scheduler=given)
    assert one.schedulers[0].state_dict() == before
    shardkit.save(f"{tmp_path}/single", step=3, scheduler=first.schedulers[0])
    with pytest.raises(shardkit.ConfigurationError, match=r"scheduler= is a list of 2, .* with one"):
        shardkit.restore(f"{tmp_path}/single", scheduler=one.schedulers)
    with pytest.raises(shardkit.ConfigurationError, match="group 0 of the optimizer in"):
        shardkit.restore(tmp_path, model=one.models, optimizer=one.optimizers[::-1])
    with pytest.raises(
        shardkit.ConfigurationError, match="optimizer is a object, expected a torch optimizer"
    ):
        shardkit.save(tmp_path, step=4, model=one.models, optimizer=object())  # type: ignore[call-overload]
    with pytest.raises(shardkit.ConfigurationError, match="optimizer 1 of the list has 'generator"):
        shardkit.save(tmp_path, step=4, model=one.models, optimizer=[one.optimizers[0]] * 2)
    for wrong in ("cosine", None):
        with pytest.raises(
            shardkit.ConfigurationError, match=f"is a {type(wrong).__name__} without state_dict"
        ):
            shardkit.save(tmp_path, step=4, model=one.models, scheduler=[wrong])  # type: ignore[list-item]


@on_ranks(2)
def test_it_is_what_torch_makes_of_a_list(rank: int, tmp_path: Path) -> None:
    model, optimizers = build("two_plain")
    step(model, optimizers, 0)
    shardkit.save(tmp_path, step=1, model=model, optimizer=optimizers)
    if rank == 0:
        _, theirs = get_state_dict(model, optimizers, options=StateDictOptions(cpu_offload=True))
        ours = content(tmp_path)["optimizer"]
        assert ours["state"].keys() == theirs["state"].keys()
        for name, state in theirs["state"].items():
            for key, value in state.items():
                assert torch.equal(torch.as_tensor(ours["state"][name][key]), torch.as_tensor(value))
        for mine, group in zip(ours["param_groups"], theirs["param_groups"], strict=True):
            assert mine["params"] == group["params"]
            assert mine["lr"] == group["lr"]


class _WithMore(torch.optim.SGD):
    """Keeps a number beside the state of parameters, once there is one."""

    number = 0

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), **({"number": self.number} if self.number else {})}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.number = state_dict.get("number", 0)
        super().load_state_dict(state_dict)


@on_ranks((2, "simulated"))
def test_what_an_optimizer_keeps_beside_is_not_lost(rank: int, tmp_path: Path) -> None:
    model = nn.ModuleDict({k: shardkit.fully_shard(nn.Linear(3, 3)) for k in "ab"})
    optimizers = [_WithMore(model["a"].parameters(), lr=0.1), torch.optim.Adam(model["b"].parameters())]
    optimizers[0].number = 7
    shardkit.save(tmp_path, step=1, model=model, optimizer=optimizers)
    fresh = [_WithMore(model["a"].parameters(), lr=0.1), optimizers[1]]
    with pytest.raises(shardkit.ConfigurationError, match="has number beside the state of parameters"):
        shardkit.restore(tmp_path, model=model, optimizer=fresh)
    fresh[0].number = 1
    shardkit.restore(tmp_path, model=model, optimizer=fresh)
    assert fresh[0].number == 7


@on_ranks((2, "simulated"))
def test_averages_of_adascale_come_back_from_a_list(rank: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = shardkit.FSDP(nn.Sequential(shardkit.FSDP(nn.Linear(3, 3)), shardkit.FSDP(nn.Linear(3, 3))))
    first, second = (list(m.parameters()) for m in model.module)

    def build() -> list[torch.optim.Optimizer]:
        return [shardkit.AdaScale(torch.optim.SGD(first, lr=0.1)), torch.optim.SGD(second, lr=0.1)]

    trained = build()
    for k in range(3):
        model(torch.full((2, 3), float(rank + k))).square().sum().backward()
        for optimizer in trained:
            optimizer.step()
            optimizer.zero_grad()
    shardkit.save(tmp_path, step=3, model=model, optimizer=trained)
    expected = trained[0].state_dict()["state"]["adascale"]
    trained[0].unhook()  # type: ignore[attr-defined]
    again = build()
    shardkit.restore(tmp_path, model=model, optimizer=again)
    found = again[0].state_dict()["state"]["adascale"]
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) and bool(value.any()) for name, value in expected.items())
