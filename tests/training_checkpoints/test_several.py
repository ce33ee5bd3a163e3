"""Several optimizers and schedulers in one checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

import shardkit
from tests.pools import rank_pool
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


def _adversaries(rank: int, folder: str) -> None:
    first = _Adversaries()
    for k in range(3):
        first.step(k)
    shardkit.save(folder, step=3, **first.parts)
    expected = [first.step(k) for k in range(3, 6)]
    again = _Adversaries()
    assert shardkit.restore(folder, **again.parts).step == 3
    assert [again.step(k) for k in range(3, 6)] == expected
    one = _Adversaries()
    with pytest.raises(shardkit.ConfigurationError, match="has 1 param groups, and 2 in"):
        shardkit.restore(folder, model=one.models, optimizer=one.optimizers[:1])
    with pytest.raises(shardkit.ConfigurationError, match="1 schedulers are to be restored"):
        shardkit.restore(folder, model=one.models, scheduler=one.schedulers[:1])
    with pytest.raises(shardkit.ConfigurationError, match="optimizer 1 of the list has 'generator"):
        shardkit.save(folder, step=4, model=one.models, optimizer=[one.optimizers[0]] * 2)
    with pytest.raises(shardkit.ConfigurationError, match="scheduler is a str without state_dict"):
        shardkit.save(folder, step=4, model=one.models, scheduler=["cosine"])  # type: ignore[list-item]


def test_adversaries_go_on_to_the_bit(tmp_path: Path) -> None:
    rank_pool(2).run(_adversaries, str(tmp_path))


def _both_forms(rank: int, folder: str) -> None:
    model, optimizers = build("two_plain")
    step(model, optimizers, 0)
    shardkit.save(folder, step=1, model=model, optimizer=optimizers)
    if rank == 0:
        _, theirs = get_state_dict(model, optimizers, options=StateDictOptions(cpu_offload=True))
        ours = content(folder)["optimizer"]
        assert ours["state"].keys() == theirs["state"].keys()
        for name, state in theirs["state"].items():
            for key, value in state.items():
                assert torch.equal(torch.as_tensor(ours["state"][name][key]), torch.as_tensor(value))
        for mine, group in zip(ours["param_groups"], theirs["param_groups"], strict=True):
            assert mine["params"] == group["params"]
            assert mine["lr"] == group["lr"]


def test_it_is_what_torch_makes_of_a_list(tmp_path: Path) -> None:
    rank_pool(2).run(_both_forms, str(tmp_path))
