"""``torch.compile(backend="openxla")`` in replicas: around modules, inside of wrappers, and around collectives."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

import shardkit
from shardkit.backend import get_backend
from tests.beside import batch
from tests.pools import on_ranks, rank_pool

pytest.importorskip("torch_xla")
pytestmark = pytest.mark.xla

WORLD, STEPS = 2, 3
OPTIONS: dict[str, Any] = {"lr": 0.1, "momentum": 0.9}
compiled: Any = functools.partial(torch.compile, backend="openxla")


class Net(nn.Module):
    """Two blocks. A class of its own: torch compiles no nn.Sequential in place."""

    def __init__(self) -> None:
        super().__init__()
        blocks = (nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 4)) for _ in range(2))
        self.blocks = nn.Sequential(*blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x)


def _model() -> Net:
    torch.manual_seed(0)
    return Net()


def _alone() -> list[list[float]]:
    """Losses of all ranks' batches, step by step, in one process that compiles nothing."""
    model, found = _model(), []
    optimizer = torch.optim.SGD(model.parameters(), **OPTIONS)
    for step in range(STEPS):
        optimizer.zero_grad()
        losses = [model(batch(rank, step, 3, 4)).square().mean() for rank in range(WORLD)]
        torch.stack(losses).mean().backward()
        optimizer.step()
        found.append([loss.item() for loss in losses])
    return found


def _wrapped(kind: str, model: Net) -> tuple[Any, torch.optim.Optimizer]:
    if "ShardedDDP" in kind:
        oss = shardkit.OSS(model.parameters(), torch.optim.SGD, **OPTIONS)
        if kind == "ShardedDDP of compiled":
            return shardkit.ShardedDDP(compiled(model), oss), oss
        if kind == "ShardedDDP, compiled in place":
            model.compile(backend="openxla")
            return shardkit.ShardedDDP(model, oss), oss
        return compiled(shardkit.ShardedDDP(model, oss)), oss
    blocks = model.blocks
    if kind == "FSDP, a block compiled":
        blocks[0], blocks[1] = compiled(blocks[0]), shardkit.FSDP(blocks[1])
    for k in (0, 1) if kind == "FSDP of compiled" else ():
        blocks[k] = shardkit.FSDP(compiled(blocks[k]))
    for k in (0, 1) if kind in ("compiled units", "compiled FSDP") else ():
        blocks[k] = shardkit.FSDP(blocks[k])
        blocks[k] = compiled(blocks[k]) if kind == "compiled units" else blocks[k]
    whole: Any = shardkit.FSDP(model)
    whole = compiled(whole) if kind == "compiled FSDP" else whole
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
        loss = model(batch(rank, step, 3, 4).to(torch_xla.device())).square().mean()
        loss.backward()
        optimizer.step()
        torch_xla.sync()
        losses.append(loss.item())
    meet()
    return losses, counters["stats"]["unique_graphs"]


KINDS = {
    "ShardedDDP of compiled": True, "ShardedDDP, compiled in place": True, "compiled ShardedDDP": True,
    "FSDP of compiled": False, "FSDP, a block compiled": False, "compiled units": False, "compiled FSDP": False,
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_training_equals_one_process(kind: str) -> None:
    expected = _alone()
    for rank, (losses, graphs) in enumerate(rank_pool(WORLD, "xla").run(_train, kind)):
        assert losses == pytest.approx([step[rank] for step in expected], rel=1e-5)
        # parameters of FSDP units are gathered anew for each use: torch runs these as they are written
        assert (graphs > 0) is KINDS[kind]


@on_ranks((WORLD, "xla"))
def test_each_replica_has_as_many_versions_of_a_function_as_a_process(rank: int) -> None:
    from torch._dynamo.utils import counters

    meet = get_backend("xla").group().barrier
    meet()
    torch._dynamo.reset()
    counters.clear()
    meet()
    model = _model()
    run = compiled(_model().to("xla"), dynamic=False)
    for rows in range(1, 7):
        with torch.no_grad():
            torch.testing.assert_close(run(torch.ones(rows, 4).to("xla")).cpu(), model(torch.ones(rows, 4)))
    meet()
    assert counters["stats"]["unique_graphs"] == 6 * WORLD


@on_ranks((WORLD, "xla"))
def test_collectives_are_between_graphs(rank: int) -> None:
    import torch_xla.core.xla_model as xm

    def program(x: torch.Tensor) -> torch.Tensor:
        total = xm.all_reduce(xm.REDUCE_SUM, x * 2, pin_layout=False) + 1
        parts = xm.all_gather(total * (rank + 1), dim=0)
        return xm.reduce_scatter(xm.REDUCE_SUM, parts.tanh(), 1.0, 0, WORLD) + total

    x = [batch(r, 0, 3, 4) for r in range(WORLD)]
    total = sum(2 * each for each in x) + 1
    parts = torch.cat([total * (r + 1) for r in range(WORLD)]).tanh()
    wanted = WORLD * parts.chunk(WORLD)[rank] + total
    with pytest.raises(Exception, match="leave out fullgraph=True"):
        compiled(program, fullgraph=True)(x[rank].to("xla"))
    for _ in range(2):
        torch.testing.assert_close(compiled(program)(x[rank].to("xla")).cpu(), wanted)
    assert xm.all_reduce(xm.REDUCE_SUM, torch.ones(2, device="xla")).tolist() == [WORLD] * 2
