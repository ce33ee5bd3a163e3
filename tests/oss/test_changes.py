"""``sends_changes=True``: what a step has changed travels, exactly, beside the same training that sends all."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from shardkit import (
    OSS,
    Compression,
    ConfigurationError,
    OffloadPolicy,
    PrecisionPolicy,
    ReshardPolicy,
    ShardedDDP,
    SkipOutOfMemory,
    fully_shard,
    sharding_of,
)
from tests.doors import linears, through
from tests.figures.counters import OperationCounter
from tests.pools import rank_pool


def _model() -> nn.Sequential:
    return linears(64, 301, 67, 3).bfloat16()


def _loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(10 * step + rank))
    return model(x.bfloat16()).float().square().mean()


def _both(rank: int, world_size: int, lr: float) -> tuple[float, float]:
    dense, changes = _model(), _model()
    pairs = []
    for model in (dense, changes):
        optimizer = OSS(
            model.parameters(), torch.optim.AdamW, lr=lr, masters=True, sends_changes=model is changes
        )
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


class _Odd(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wide, self.narrow = (nn.Parameter(torch.randn(n, 7).to(dtype)) for n in (600, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.wide[::3].abs() * x).mean() + self.narrow.abs().sum()


def _odd_dtypes(rank: int) -> None:
    """Numbers of any width, of which a third of the gradients is there."""
    for dtype in (torch.complex128, torch.complex64, torch.float64, torch.float16):
        dense, changes = _Odd(dtype), _Odd(dtype)
        for model in (dense, changes):
            optimizer = OSS(model.parameters(), torch.optim.SGD, lr=0.1, sends_changes=model is changes)
            for step in range(3):
                model(torch.tensor(1.0 + step)).backward()
                optimizer.step()
                optimizer.zero_grad()
        torch.testing.assert_close(list(changes.parameters()), list(dense.parameters()), rtol=0, atol=0)


def _gathered(
    rank: int, world_size: int, door: str, lr: float, offload: OffloadPolicy
) -> tuple[float, float]:
    """Shards of fp32, computed with in bf16: of these ranks have what they had received."""
    precision = PrecisionPolicy(compute=torch.bfloat16)
    dense, changes = (
        through(door, _model().float(), "0", "2", precision=precision, reshard=reshard, offload=offload)
        for reshard in (ReshardPolicy(False), ReshardPolicy(door == "FSDP", sends_changes=True))
    )
    optimizers = [torch.optim.AdamW(m.parameters(), lr=lr) for m in (dense, changes)]
    sent = [0.0, 0.0]
    for step in range(5):
        for k, (model, optimizer) in enumerate(zip((dense, changes), optimizers, strict=True)):
            with OperationCounter(world_size) as counter:
                _loss(model, step, rank).backward()
            optimizer.step()
            optimizer.zero_grad()
            sent[k] = counter.sent
        for model in (dense, changes) if step == 2 else ():
            with torch.no_grad(), sharding_of(model).summon_full_params():
                for p in model.parameters():
                    p[:1].mul_(0.5)
        with torch.inference_mode():
            assert torch.equal(_loss(dense, step, 0), _loss(changes, step, 0))
    for a, b in zip(dense.parameters(), changes.parameters(), strict=True):
        assert torch.equal(*(getattr(p, "to_local", lambda p=p: p)() for p in (a, b)))
    copied = copy.deepcopy(changes)
    assert torch.equal(_loss(copied, 7, rank), _loss(dense, 7, rank))
    return sent[0], sent[1]


def _refused_in_shards(rank: int) -> None:
    with pytest.raises(ConfigurationError, match="a copy of all values"):
        ReshardPolicy(2, sends_changes=True)
    reshard = ReshardPolicy(sends_changes=True)
    with pytest.raises(ConfigurationError, match="with compression of parameters"):
        fully_shard(_model(), reshard=reshard, precision=PrecisionPolicy(compression=Compression()))
    with pytest.raises(ConfigurationError, match="depends on what has changed"):
        SkipOutOfMemory(fully_shard(_model(), reshard=reshard))


@pytest.mark.parametrize("door", ["FSDP", "fully_shard", "dtensors"])
def test_gathers_send_what_has_changed(door: str) -> None:
    nbytes = sum(p.numel() for p in _model().parameters()) * 2
    cases = [(2, 1e-6, 1.1, OffloadPolicy()), (3, 1e-6, 1.1, OffloadPolicy(masters=True))]
    for ranks, lr, most, offload in (
        [*cases, (2, 0.3, 2.05, OffloadPolicy())] if door == "FSDP" else cases[:1]
    ):
        found = rank_pool(ranks).run(_gathered, ranks, door, lr, offload)
        dense, changes = (sum(sent) for sent in zip(*found, strict=True))
        assert changes <= most * nbytes * (ranks - 1)
        assert dense == 0 or dense >= 1.98 * nbytes * (ranks - 1)  # 0: other threads issue
    rank_pool(2).run(_refused_in_shards)


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
    rank_pool(2).run(_odd_dtypes)
