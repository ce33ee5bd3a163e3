"""``OSS(sends_changes=True)``: what a step has changed travels, exactly, beside the same training that sends all."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from shardkit import OSS, ConfigurationError, ShardedDDP
from tests.figures.counters import OperationCounter
from tests.pools import rank_pool


class WithMasters(torch.optim.AdamW):
    """Updates masters of fp32, from which the weights are rounded."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        rounded = [(p, p.data, p.grad) for p in params]
        masters = self.__dict__.setdefault("masters", {})
        for p, data, gradient in rounded:
            master = masters.get(p)
            if master is None or not torch.equal(master.to(data.dtype), data):
                master = masters[p] = data.float()
            p.grad, p.data = None, master
            p.grad = gradient.float()  # type: ignore[union-attr]
        super().step()
        for p, data, gradient in rounded:
            p.grad = None
            p.data = data.copy_(masters[p])
            p.grad = gradient


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, 301), nn.Tanh(), nn.Linear(301, 67), nn.Tanh(), nn.Linear(67, 3)
    ).bfloat16()


def _loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(10 * step + rank))
    return model(x.bfloat16()).float().square().mean()


def _both(rank: int, world_size: int, lr: float) -> tuple[float, float]:
    dense, changes = _model(), _model()
    pairs = []
    for model in (dense, changes):
        optimizer = OSS(model.parameters(), WithMasters, lr=lr, sends_changes=model is changes)
        pairs.append((ShardedDDP(model, optimizer), optimizer))
    sent = [0.0, 0.0]
    for step in range(6):
        for k, (model, optimizer) in enumerate(pairs):
            with OperationCounter(world_size) as counter:
                _loss(model, step, rank).backward()
                optimizer.step()
            optimizer.zero_grad()
            sent[k] = counter.sent
        torch.testing.assert_close(list(changes.parameters()), list(dense.parameters()), rtol=0, atol=0)
        if step == 3 and rank == 1:
            for (_, optimizer), model in zip(pairs, (dense, changes), strict=True):
                for p in model.parameters():
                    if optimizer.owner_of(p) != rank:  # the owner's values count
                        p.data.add_(0.5)
    return sent[0], sent[1]


def _refused(rank: int) -> None:
    model = _model()
    for options, match in (
        ({"optim": torch.optim.LBFGS}, "whole parameters on their owners"),
        ({"broadcast_dtype": torch.float16}, "name one of them"),
    ):
        with pytest.raises(ConfigurationError, match=match):
            OSS(copy.deepcopy(model).parameters(), sends_changes=True, **options)  # type: ignore[arg-type]


def test_a_step_sends_what_has_changed() -> None:
    nbytes = sum(p.numel() for p in _model().parameters()) * 2
    for ranks, lr, most in ((2, 1e-6, 1.1), (3, 1e-6, 1.1), (2, 0.3, 2.02)):  # all of it, where that is less
        dense, changes = (sum(sent) for sent in zip(*rank_pool(ranks).run(_both, ranks, lr), strict=True))
        assert changes <= most * nbytes * (ranks - 1)
        assert dense == 0 or dense >= 1.98 * nbytes * (ranks - 1)  # 0: other threads issue
    rank_pool(2).run(_refused)
