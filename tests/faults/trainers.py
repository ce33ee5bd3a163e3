"""The same small training by each strategy."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import shardkit


class Trainer:
    """A model, its optimizer, and the parts of a step.

    Attributes:
        no_sync: a context in which gradients stay this rank's own.
        collect: something that all ranks do together between steps, in the strategy's own collectives.
        refused: something that shardkit refuses.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        no_sync: Callable[[], Any],
        collect: Callable[[], Any],
        refused: Callable[[], Any] = lambda: None,
    ) -> None:
        self.model, self.optimizer = model, optimizer
        self.no_sync, self.collect, self.refused = no_sync, collect, refused

    def forward(self) -> torch.Tensor:
        """The loss of one batch."""
        return self.model(torch.ones(2, 8)).square().mean()

    def backward(self) -> None:
        """Forward and backward of one batch."""
        self.forward().backward()

    def step(self) -> None:
        """A whole step."""
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class Chain(nn.Module):
    """Equal blocks, called in ``order``."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 12)
        self.a = nn.Linear(12, 12)
        self.b = nn.Linear(12, 12)
        self.last = nn.Linear(12, 4)
        self.order = ("a", "b")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).tanh()
        for name in self.order:
            x = getattr(self, name)(x).tanh()
        return self.last(x)  # type: ignore[no-any-return]


def make_trainer(strategy: str) -> Trainer:
    """A new model with the same start values on all ranks."""
    torch.manual_seed(0)
    model = Chain()
    if strategy == "fsdp":
        for name in ("first", "a", "b", "last"):
            setattr(model, name, shardkit.FSDP(getattr(model, name)))
        root = shardkit.FSDP(model)
        below: Any = model.first
        return Trainer(
            root, torch.optim.AdamW(root.parameters(), lr=1e-2), root.no_sync, root.state_dict,
            lambda: below.no_sync().__enter__(),
        )  # fmt: skip
    if strategy == "sharded_ddp":
        optimizer = shardkit.OSS(model.parameters(), torch.optim.AdamW, lr=1e-2)
        wrapped = shardkit.ShardedDDP(model, optimizer)
        return Trainer(
            wrapped, optimizer, wrapped.no_sync, optimizer.consolidate_state_dict, optimizer.state_dict
        )
    if strategy == "ddp":
        parallel = nn.parallel.DistributedDataParallel(model)
        adam = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
        return Trainer(parallel, adam, parallel.no_sync, torch.distributed.barrier)
    return _fsdp2(model)


def _fsdp2(model: Chain) -> Trainer:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for name in ("first", "a", "b", "last"):
        fully_shard(getattr(model, name), mesh=mesh)
    root: Any = fully_shard(model, mesh=mesh)

    @contextlib.contextmanager
    def no_sync() -> Any:
        root.set_requires_gradient_sync(False)
        yield
        root.set_requires_gradient_sync(True)

    adam = torch.optim.AdamW(root.parameters(), lr=1e-2)
    return Trainer(root, adam, no_sync, torch.distributed.barrier)
