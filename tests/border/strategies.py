"""Small models under each strategy, and beside one of them the same model in one process.

Sizes are uneven on purpose: flat parameters are padded, original parameters lie across the borders of shards.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim import Optimizer

from shardkit import OSS, PrecisionPolicy, ReshardPolicy, ShardedDDP
from tests.beside import assert_same
from tests.doors import through
from tests.fsdp_models import WIDTH
from tests.pools import rank_pool

STRATEGIES = ["fsdp", "units", "unflattened", "in_place", "sharded_ddp"]
GLOO = [(n, "gloo") for n in (1, 2, 3)]
WORLDS = [(1, "gloo"), (2, "gloo"), (3, "simulated")]
needs_xla = pytest.mark.skipif(find_spec("torch_xla") is None, reason="needs torch_xla")


def make_model() -> nn.Sequential:
    """79 parameters in three layers; the last one is small enough to lie on one rank."""
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3, bias=False), nn.Tanh(), nn.Linear(3, 4))


def batch(rank: int, step: int = 0) -> torch.Tensor:
    """[6, 5], another one for each rank and step."""
    return torch.randn(6, 5, generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(model: nn.Module, rank: int, step: int = 0) -> torch.Tensor:
    """Large enough for gradients that clipping at 0.1 changes."""
    return mse_loss(model(batch(rank, step)), torch.ones(6, 4)) * 10


def wrapped(strategy: str, model: nn.Sequential) -> nn.Module:
    """Sharded, in one of the forms of FSDP."""
    door = {"fsdp": "FSDP", "units": "FSDP", "in_place": "fully_shard"}.get(strategy, strategy)
    units = range(2, len(model), 2) if strategy in ("units", "in_place") else ()
    return through(door, model, *map(str, units))  # type: ignore[no-any-return]


@dataclasses.dataclass
class Twins:
    """A wrapped model and its optimizer, and the same in one process."""

    rank: int
    world_size: int
    model: nn.Module
    optimizer: Optimizer
    plain: nn.Module
    plain_optimizer: Optimizer

    def backward(self, step: int = 0, scale: float = 1.0) -> None:
        """Gradients of all ranks' batches, on both."""
        (loss_of(self.model, self.rank, step) * scale).backward()
        losses = [loss_of(self.plain, r, step) for r in range(self.world_size)]
        (torch.stack(losses).mean() * scale).backward()

    def zero_grad(self) -> None:
        self.model.zero_grad()
        self.plain.zero_grad()

    def step(self) -> None:
        self.optimizer.step()
        self.plain_optimizer.step()

    def assert_equal(self, tolerance: float = 1e-6) -> None:
        """Same parameters under the same names (collective)."""
        assert_same(self.model, self.plain, atol=tolerance)


def twins(
    rank: int, world_size: int, strategy: str, optim: Callable[..., Optimizer] = torch.optim.SGD,
    make: Callable[[], nn.Sequential] = make_model, **options: Any,
) -> Twins:  # fmt: skip
    """A model under a strategy with its optimizer, beside a plain one."""
    options = options or {"lr": 0.1, "momentum": 0.9}
    plain, inner = make(), make()
    if strategy == "sharded_ddp":
        optimizer: Optimizer = OSS(inner.parameters(), optim, **options)
        model: nn.Module = ShardedDDP(inner, optimizer)  # type: ignore[arg-type]
    else:
        model = wrapped(strategy, inner)
        optimizer = optim(model.parameters(), **options)
    return Twins(rank, world_size, model, optimizer, plain, optim(plain.parameters(), **options))


@contextlib.contextmanager
def heard(level: int = logging.NOTSET) -> Iterator[list[str]]:
    """What shardkit's logger says inside, from a level on."""
    messages: list[str] = []
    handler = logging.Handler(level)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("shardkit").addHandler(handler)
    try:
        yield messages
    finally:
        logging.getLogger("shardkit").removeHandler(handler)


def run(world: tuple[int, str], program: Callable[..., Any], *args: Any) -> list[Any]:
    """Runs ``program(rank, world_size, *args)`` on every rank; returns their results."""
    world_size, backend = world
    return rank_pool(world_size, backend).run(program, world_size, *args)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "unflattened": {"flatten": False},
    "bf16": {"precision": PrecisionPolicy(compute=torch.bfloat16, buffers=torch.bfloat16)},
    "kept": {"reshard": ReshardPolicy(after_forward=False)},
}


class Net(nn.Module):
    """Two units below the root; a layer of the root's own."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh())
        self.norm = nn.BatchNorm1d(5)
        self.head = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.block(x)))

    def generate(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = torch.cat([self(x), self.forward(x)], 1)
        return x


def wrap(model: Any, **options: Any) -> Any:
    return through("FSDP", model, "block", "norm", **options)
