"""``torch.compile(backend="openxla")`` in replicas: around modules, inside of wrappers, and around collectives."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

import shardkit
from shardkit.backend import get_backend
from tests.pools import rank_pool

pytest.importorskip("torch_xla")
pytestmark = [pytest.mark.xla, pytest.mark.timeout(120)]

WORLD, STEPS = 2, 3
OPTIONS: dict[str, Any] = {"lr": 0.1, "momentum": 0.9}
compiled: Any = functools.partial(torch.compile, backend="openxla")


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 4)) for _ in range(2)))


def _batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank))


def _alone() -> list[list[float]]:
    """Losses of all ranks' batches, step by step, in one process that compiles nothing."""
    model, found = _model(), []
    optimizer = torch.optim.SGD(model.parameters(), **OPTIONS)
    for step in range(STEPS):
        optimizer.zero_grad()
        losses = [model(_batch(rank, step)).square().mean() for rank in range(WORLD)]
        torch.stack(losses).mean().backward()
        optimizer.step()
        found.append([loss.item() for loss in losses])
    return found


def _wrapped(kind: str, model: nn.Sequential) -> tuple[Any, torch.optim.Optimizer]:
    if "ShardedDDP" in kind:
        oss = shardkit.OSS(model.parameters(), torch.optim.SGD, **OPTIONS)
        if kind == "ShardedDDP of compiled":
            return shardkit.ShardedDDP(compiled(model), oss), oss
        if kind == "ShardedDDP, compiled in place":
            model.compile(backend="openxla")
            return shardkit.ShardedDDP(model, oss), oss
        return compiled(shardkit.ShardedDDP(model, oss)), oss
    if kind == "FSDP of compiled":
        whole: Any = shardkit.FSDP(nn.Sequential(*(shardkit.FSDP(compiled(block)) for block in model)))
    elif kind == "FSDP, a block compiled":
        model[1] = shardkit.FSDP(model[1])
        model[0] = compiled(model[0])
        whole = shardkit.FSDP(model)
    elif kind == "compiled units":
        whole = shardkit.FSDP(nn.Sequential(*(compiled(shardkit.FSDP(block)) for block in model)))
    else:
        whole = compiled(shardkit.FSDP(nn.Sequential(*(shardkit.FSDP(block) for block in model))))
    return whole, torch.optim.SGD(whole.parameters(), **OPTIONS)


def _train(rank: int, kind: str) -> tuple[list[float], int]:
    """Losses, and how many graphs torch.compile made in this process."""
    import torch_xla
    from torch._dynamo.utils import counters

    meet = get_backend("xla").group().barrier
    meet()
    torch._dynamo.reset()
    counters.clear()
    meet()
    model, optimizer = _wrapped(kind, _model().to(torch_xla.device()))
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(_batch(rank, step).to(torch_xla.device())).square().mean()
        loss.backward()
        optimizer.step()
        torch_xla.sync()
        losses.append(loss.item())
    meet()
    return losses, counters["stats"]["unique_graphs"]


KINDS: dict[str, bool | None] = {
    "ShardedDDP of compiled": True, "ShardedDDP, compiled in place": None, "compiled ShardedDDP": True,
    "FSDP of compiled": False, "FSDP, a block compiled": False, "compiled units": False, "compiled FSDP": False,
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_training_equals_one_process(kind: str) -> None:
    expected = _alone()
    for rank, (losses, graphs) in enumerate(rank_pool(WORLD, "xla").run(_train, kind)):
        assert losses == pytest.approx([step[rank] for step in expected], rel=1e-5)
        # parameters of FSDP units are gathered anew for each use: torch runs these as they are written
        assert KINDS[kind] in (None, graphs > 0)


def _collectives(rank: int) -> None:
    import torch_xla.core.xla_model as xm

    def program(x: torch.Tensor) -> torch.Tensor:
        total = xm.all_reduce(xm.REDUCE_SUM, x * 2, pin_layout=False) + 1
        parts = xm.all_gather(total * (rank + 1), dim=0)
        return xm.reduce_scatter(xm.REDUCE_SUM, parts.tanh(), 1.0, 0, WORLD) + total

    x = [_batch(r, 0) for r in range(WORLD)]
    total = sum(2 * each for each in x) + 1
    parts = torch.cat([total * (r + 1) for r in range(WORLD)]).tanh()
    wanted = WORLD * parts.chunk(WORLD)[rank] + total
    with pytest.raises(Exception, match="leave out fullgraph=True"):
        compiled(program, fullgraph=True)(x[rank].to("xla"))
    for _ in range(2):
        torch.testing.assert_close(compiled(program)(x[rank].to("xla")).cpu(), wanted)
    assert xm.all_reduce(xm.REDUCE_SUM, torch.ones(2, device="xla")).tolist() == [WORLD] * 2


def test_collectives_are_between_graphs() -> None:
    rank_pool(WORLD, "xla").run(_collectives)
