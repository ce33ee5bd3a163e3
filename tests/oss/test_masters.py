"""``OSS(masters=True)``: weights of 16 bits as one process rounds them from an fp32 model that it trains."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardkit
from shardkit import OSS, ConfigurationError, ShardedDDP
from shardkit.errors import RankFailedError
from shardkit.xla import xla_model as xm
from tests.backends.environments import environments
from tests.pools import on_ranks, rank_pool

_OPTIMIZERS: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.AdamW, {"lr": 1e-3}),
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.NAdam, {"lr": 1e-3}),
    (torch.optim.Adafactor, {"lr": 1e-3}),
]


class _Norm(nn.LayerNorm):
    """Norm in fp32, whose parameters are their own masters."""

    def __init__(self) -> None:
        super().__init__(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.float())


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 5), _Norm()).bfloat16()
    model[3].float()
    return model.to(xm.xla_device())


def _loss(model: nn.Module, step: int) -> torch.Tensor:
    """Returns the same on all ranks, so that two ranks' mean is exact in 16 bits, too."""
    x = torch.randn(8, 7, generator=torch.Generator().manual_seed(step)).bfloat16()
    return model(x.to(xm.xla_device())).pow(3).mean()


def _beside_one_process(rank: int, kind: Any, options: dict[str, Any], folder: str, steps: range) -> None:
    model, wide = _model(), _model().float()
    sends = xm.xla_device().type == "cpu"
    optimizer = OSS(model.parameters(), functools.partial(kind), masters=True, sends_changes=sends, **options)
    sharded = ShardedDDP(model, optimizer)
    if steps.start:
        shardkit.restore(folder, model=sharded, optimizer=optimizer)
    truth, reference = _model(), kind(wide.parameters(), **options)
    calls = []
    optimizer.optim.register_step_pre_hook(lambda *_: calls.append(1))
    for step in range(steps.stop):
        for p, w in zip(truth.parameters(), wide.parameters(), strict=True):
            p.data.copy_(w.data)
        _loss(truth, step).backward()
        for p, w in zip(truth.parameters(), wide.parameters(), strict=True):
            assert p.grad is not None
            w.grad, p.grad = p.grad.to(w.dtype), None
        reference.step()
        if step in steps:
            _loss(sharded, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            for p, w in zip(model.parameters(), wide.parameters(), strict=True):
                torch.testing.assert_close(p.data, w.data.to(p.dtype), rtol=0, atol=0)
        if step == 1:  # what a program writes to weights counts, and no more than that
            for parameters in (wide, model)[: 1 + (step in steps)]:
                first = next(parameters.parameters())
                with torch.no_grad():
                    (first.data if sends else first)[3:5].fill_(0.5)
    assert len(calls) == len(steps)
    if not steps.start:
        shardkit.save(folder, model=sharded, optimizer=optimizer, step=steps.stop)


@pytest.mark.parametrize(("kind", "options"), _OPTIMIZERS, ids=lambda v: getattr(v, "__name__", ""))
def test_weights_are_rounded_from_what_one_process_trains(kind: Any, options: Any, tmp_path: Path) -> None:
    """Also on another number of ranks that goes on from a checkpoint."""
    rank_pool(2).run(_beside_one_process, kind, options, str(tmp_path), range(4))
    rank_pool(1).run(_beside_one_process, kind, options, str(tmp_path), range(4, 7))


@pytest.mark.parametrize("backend", [pytest.param("xla", marks=environments("xla")[0].marks)])
def test_flat_masters_are_as_one_process_trains(backend: str, tmp_path: Path) -> None:
    """Where all ranks run one program; also on another number of ranks."""
    for kind, options in _OPTIMIZERS[:3]:
        folder = str(tmp_path / kind.__name__)
        for world_size, steps in ((2, range(4)), (1, range(4, 7))):
            rank_pool(world_size, backend).run(_beside_one_process, kind, options, folder, steps)
    with pytest.raises(RankFailedError, match="float32, and Adafactor is not known to be element-wise"):
        rank_pool(2, backend).run(_beside_one_process, *_OPTIMIZERS[3], "", range(1))


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
@on_ranks(2)
def test_closures_see_rounded_weights(rank: int, kind: Any) -> None:
    """Whether the class makes state of its own in its first step, after them, or none."""
    model = _model()
    optimizer = OSS(model.parameters(), kind, masters=True, lr=0.1)
    seen = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        seen.append({p.dtype for p in model[0].parameters()})
        loss = _loss(model, 0)
        loss.backward()
        return loss

    before = copy.deepcopy(model[0].weight.data)
    with pytest.raises(ZeroDivisionError):
        optimizer.step(lambda: 1 / 0)
    assert model[0].weight.dtype is torch.bfloat16
    closure()  # leaves gradients, which the step would take before it evaluates
    assert torch.is_tensor(optimizer.step(closure))
    assert seen == 2 * [{torch.bfloat16}]
    assert not torch.equal(model[0].weight, before)


@on_ranks(2)
def test_what_has_no_class_is_refused(rank: int) -> None:
    with pytest.raises(ConfigurationError, match="takes a class of optimizers"):
        OSS(_model().parameters(), lambda params: torch.optim.SGD(params, 0.1), masters=True)
