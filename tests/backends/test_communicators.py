"""How many communicators of its own a job makes: on NCCL each costs memory, two threads and time to connect."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import shardkit
from shardkit.backends.c10d.group import C10dGroup
from tests.pools import rank_pool


class _Made:
    """The channels that are connected meanwhile, by name."""

    def __init__(self) -> None:
        self.names: Counter[str] = Counter()

    def __enter__(self) -> Counter[str]:
        self._meet = C10dGroup._meet

        def counted(group: Any, what: str, name: str, members: Any) -> Any:
            self.names[name.partition("/")[2]] += 1
            return self._meet(group, what, name, members)

        C10dGroup._meet = counted  # type: ignore[method-assign]
        return self.names

    def __exit__(self, *error: object) -> None:
        C10dGroup._meet = self._meet  # type: ignore[method-assign]


def _model() -> nn.Sequential:
    layers = [nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)) for _ in range(3)]
    return nn.Sequential(*layers)


def _fsdp(group: Any) -> tuple[nn.Module, Any]:
    model = _model()
    for i in range(3):
        model[i] = shardkit.FSDP(model[i], group=group)
    wrapped = shardkit.FSDP(model, group=group)
    return wrapped, torch.optim.Adam(wrapped.parameters())


def _fully_shard(group: Any) -> tuple[nn.Module, Any]:
    model = _model()
    for layer in model:
        shardkit.fully_shard(layer, group=group)
    shardkit.fully_shard(model, group=group)
    return model, torch.optim.Adam(model.parameters())


def _sharded_ddp(group: Any) -> tuple[nn.Module, Any]:
    model, optimizer = _oss(group)
    return shardkit.ShardedDDP(model, optimizer, group=group), optimizer


def _oss(group: Any) -> tuple[nn.Module, Any]:
    model = _model()
    return model, shardkit.OSS(model.parameters(), torch.optim.Adam, group=group)


def _communicators(rank: int) -> dict[str, list[str]]:
    found = {}
    for make in (_oss, _sharded_ddp, _fsdp, _fully_shard):
        with _Made() as made:
            model, optimizer = make(dist.new_group([0, 1]))
            for _ in range(2):
                optimizer.zero_grad()
                model(torch.randn(4, 8)).pow(2).mean().backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
            model.state_dict()
        assert max(made.values()) == 1, made  # however many units there are
        found[make.__name__] = sorted(made)
    return found


def test_communicators_of_a_job() -> None:
    """The numbers that docs/ARCHITECTURE.md gives."""
    all_four = ["buffers", "control", "gradients", "parameters"]
    for found in rank_pool(2).run(_communicators):
        assert found == {
            "_oss": ["control", "parameters"],
            "_sharded_ddp": all_four,
            "_fsdp": all_four,
            "_fully_shard": all_four,
        }
