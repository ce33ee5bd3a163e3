"""Training scenarios run twice in each rank: plainly in one process (the truth), and with shardkit; then compared.

The truth of a data-parallel step is one process that averages the gradients of every rank's batch.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from shardkit.backend import get_backend
from shardkit.nn.data_parallel import ShardedDataParallel
from shardkit.optim.oss import OSS
from tests.beside import assert_same

Loss = Callable[[nn.Module, int], torch.Tensor]


class Truth:
    """One process; a backward sums every rank's loss, divided by the number of ranks."""

    def __init__(
        self, model: nn.Module, world_size: int, optim: Any, groups: Any, options: dict[str, Any]
    ) -> None:
        self.world_size = world_size
        self.inner = self.model = model
        self.optimizer = optim(groups(model) if groups else model.parameters(), **options)

    def backward(self, loss: Loss, **kwargs: Any) -> None:
        for rank in range(self.world_size):
            (loss(self.model, rank) / self.world_size).backward(**kwargs)

    def backward_of(self, losses: list[Loss]) -> None:
        """Several forwards first, then their backwards."""
        values = [
            [loss(self.model, rank) / self.world_size for rank in range(self.world_size)] for loss in losses
        ]
        for row in values:
            for value in row:
                value.backward()

    def no_sync(self) -> Any:
        return contextlib.nullcontext()

    def zero_grad(self, form: str, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def clip(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        return torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm, norm_type)


class Sharded:
    """This rank's part of a run with OSS and ShardedDataParallel."""

    def __init__(
        self, model: nn.Module, rank: int, optim: Any, groups: Any, options: dict[str, Any], ddp: dict[str, Any]
    ) -> None:  # fmt: skip
        self.rank = rank
        self.inner = model
        self.optimizer = OSS(groups(model) if groups else model.parameters(), optim, **options)
        self.model = ShardedDataParallel(model, self.optimizer, **ddp)

    def backward(self, loss: Loss, **kwargs: Any) -> None:
        loss(self.model, self.rank).backward(**kwargs)

    def backward_of(self, losses: list[Loss]) -> None:
        for value in [loss(self.model, self.rank) for loss in losses]:
            value.backward()

    def no_sync(self) -> Any:
        return self.model.no_sync()

    def zero_grad(self, form: str, set_to_none: bool = True) -> None:
        {"optimizer": self.optimizer, "wrapper": self.model, "module": self.inner}[form].zero_grad(
            set_to_none
        )

    def clip(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        return self.optimizer.clip_grad_norm(max_norm, norm_type)


def compare(
    rank: int,
    world_size: int,
    build: Callable[[], nn.Module],
    scenario: Callable[[Any], Iterator[str]],
    optim: Any = torch.optim.SGD,  # not Adam, whose steps hide a wrong scale of gradients
    groups: Any = None,
    options: dict[str, Any] | None = None,
    ddp: dict[str, Any] | None = None,
    tolerance: float = 2e-6,
    backend: str = "gloo",
) -> None:
    """Runs a scenario (a generator that yields a name after each step) with both and compares at every yield."""
    options = {"lr": 0.1, "momentum": 0.9} if options is None else options
    chosen = get_backend(backend)
    model = build()
    seeded(model)
    truth = Truth(copy.deepcopy(model), world_size, optim, groups, options)
    model.to(chosen.device())
    if hasattr(model, "tie"):  # a move to XLA makes new parameters, and tied ones come apart
        model.tie()
    sharded = Sharded(model, rank, optim, groups, options, ddp or {})
    for step, (where, _) in enumerate(zip(scenario(sharded), scenario(truth), strict=True)):
        chosen.mark_step()
        assert_same(
            sharded.inner, truth.inner, f"rank {rank}, step {step} ({where})", 10 * tolerance, tolerance
        )


def seeded(model: nn.Module) -> None:
    """The same start values in every rank, also where ranks are threads that share one generator."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype) / max(1, p.shape[-1]) ** 0.5)


def batch(rank: int, step: int, size: int = 5, features: int = 6) -> torch.Tensor:
    """This rank's inputs at a step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(size, features, generator=generator)


def square_loss(step: int) -> Loss:
    """Mean of squares of the model's output on the rank's batch."""
    return lambda model, rank: model(batch_for(model, rank, step)).pow(2).mean()


def batch_for(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """This rank's inputs, where the model is."""
    return batch(rank, step).to(next(model.parameters()).device)
