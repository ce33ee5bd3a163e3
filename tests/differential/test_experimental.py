"""fairscale.experimental beside shardkit.experimental: what runs on a CPU gives the same numbers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("fairscale")

from fairscale.experimental.nn import auto_shard as their_auto_shard
from fairscale.experimental.nn import mevo as their_mevo
from fairscale.experimental.nn import offload as their_offload
from fairscale.experimental.optim import DynamicLossScaler as TheirScaler
from fairscale.experimental.tooling import layer_memory_tracker as their_tracker

from shardkit.experimental.nn import auto_shard, mevo, offload
from shardkit.experimental.optim import DynamicLossScaler
from shardkit.experimental.tooling import layer_memory_tracker

pytestmark = pytest.mark.oracle


@pytest.mark.parametrize("scale", [None, 8.0])
@pytest.mark.parametrize(("tokens", "words", "factor"), [(6, 8, 1), (8, 32, 4), (16, 64, 16)])
def test_mevo(scale: float | None, tokens: int, words: int, factor: int) -> None:
    # their margin misses its target in a last tile that is smaller than the others, so tiles are even here
    found = []
    for module in (their_mevo, mevo):
        torch.manual_seed(0)
        x = torch.randn(tokens, 5, requires_grad=True)
        weight = nn.Parameter(torch.randn(words, 5))
        target = torch.randint(words, (tokens,))
        layer = module.MemoryEfficientVocabOutput(weight, tile_factor=factor, scale=scale)
        loss = layer(x, target)
        loss.backward()
        found.append((loss.detach(), x.grad, weight.grad, list(layer.state_dict())))
    theirs, ours = found
    torch.testing.assert_close(ours[:3], theirs[:3])
    assert ours[3] == theirs[3]


@pytest.mark.parametrize("seed", range(6))
def test_dynamic_loss_scaler(seed: int) -> None:
    choose = random.Random(seed)
    options = {
        "init_scale": 2.0 ** choose.randint(3, 12),
        "scale_factor": choose.choice([2.0, 4.0]),
        "scale_window": choose.randint(1, 5),
        "tolerance": choose.choice([0.0, 0.3, 0.6]),
        "threshold": choose.choice([None, 4.0]),
    }
    program = [choose.choice([1.0, 2.0, float("inf"), float("nan")]) for _ in range(60)]
    traces = []
    for kind in (TheirScaler, DynamicLossScaler):
        scaler: Any = kind(**options)
        params = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
        optimizer = torch.optim.SGD([{"params": params[:2]}, {"params": params[2:]}], lr=0.1)
        trace = []
        for step, gradient in enumerate(program):
            for i, p in enumerate(params):
                p.grad = torch.full_like(p, gradient if i == step % 3 else 1.0) * scaler.loss_scale
            try:
                scaler.step(optimizer)
            except FloatingPointError:
                trace.append("end")
            scaler.update()
            trace.append((scaler.loss_scale, [p.tolist() for p in params]))
        traces.append(trace)
    assert traces[0] == traces[1]


def _layers() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(
        *[nn.Linear(6, 6) if i % 2 else nn.Tanh() for i in range(12)], nn.Linear(6, 60), nn.ReLU()
    )


class _Named(nn.Module):
    """The same layers; theirs takes layers with numbers for names for the whole model."""

    def __init__(self) -> None:
        super().__init__()
        for i, layer in enumerate(_layers()):
            self.add_module(f"layer{i}", layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.children():
            x = layer(x)
        return x


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
def test_auto_shard_cuts_alike(count: int) -> None:
    theirs, ours = (m.shard_model(_Named(), count) for m in (their_auto_shard, auto_shard))
    assert [list(m.state_dict()) for m in ours] == [list(m.state_dict()) for m in theirs]
    for a, b in zip(ours, theirs, strict=True):
        called = [[n.target for n in m.graph.nodes if n.op == "call_module"] for m in (a, b)]
        assert called[0] == called[1]


@pytest.fixture
def _no_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)  # their _split pins, which needs CUDA
    return


@pytest.mark.usefixtures("_no_pinned_memory")
@pytest.mark.parametrize("count", [1, 2, 3, 5, 14, 30])
def test_offload_slices_alike(count: int) -> None:
    theirs, ours = (split(_layers(), count) for split in (their_offload._split, offload.split_layers))
    assert [len(s) for s in ours] == [len(s) for s in theirs if s]  # theirs has empty ones at the end


def test_best_reset_points() -> None:
    choose = random.Random(0)
    for _ in range(200):
        sizes = [choose.randint(0, 6) for _ in range(choose.randint(0, 9))]
        count = choose.randint(0, 4)
        theirs, ours = (m.find_best_reset_points(sizes, count) for m in (their_tracker, layer_memory_tracker))
        assert ours[0] == theirs[0]
        assert list(ours[1]) == list(theirs[1])
