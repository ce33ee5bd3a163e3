"""A sharded model beside one process that has the batches of all ranks: the same steps, the same values."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

Loss = Callable[[Any, int, int], torch.Tensor]  # of a model, for the batch of a rank at a step
SGD = partial(torch.optim.SGD, lr=0.1)


def batch(rank: int, step: int = 0, size: int = 5, features: int = 6) -> torch.Tensor:
    """A rank's inputs at a step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(size, features, generator=generator)


def mean_square(model: Any, rank: int, step: int) -> torch.Tensor:
    """Of the model's output on the rank's inputs, where the model is."""
    output: torch.Tensor = model(batch(rank, step).to(next(model.parameters()).device))
    return output.square().mean()


def whole(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The values of all ranks where they are DTensors, on the CPU."""
    return {name: (v.full_tensor() if hasattr(v, "full_tensor") else v).cpu() for name, v in state.items()}


def reread(value: Any, **options: Any) -> Any:
    """As ``torch.load`` reads it from a file."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, **options)


def assert_same(
    model: nn.Module, plain: nn.Module, where: str = "", rtol: float = 1e-5, atol: float = 2e-6
) -> None:
    """Names and values of all parameters and buffers agree (collective)."""
    mine, truth = whole(model.state_dict()), whole(plain.state_dict())
    if list(mine) != list(truth):  # as ShardedDDP's
        mine = {name.removeprefix("module."): v for name, v in mine.items()}
    assert list(mine) == list(truth), where
    for name, value in truth.items():
        torch.testing.assert_close(
            mine[name], value, rtol=rtol, atol=atol, msg=lambda m, n=name: f"{where}: {n}: {m}"
        )


def steps_beside(
    rank: int, world_size: int, model: Any, plain: Any, loss: Loss,
    optimizers: Sequence[Optimizer] | None = None, steps: Iterable[int] = range(3),
    before_step: Callable[[], object] = lambda: None,
) -> None:  # fmt: skip
    """Steps of a rank's model on its own loss, and of one process on the mean of all ranks' losses."""
    optimizers = optimizers or [SGD(m.parameters()) for m in (model, plain)]
    for step in steps:
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss(model, rank, step).backward()
        torch.stack([loss(plain, r, step) for r in range(world_size)]).mean().backward()
        before_step()
        for optimizer in optimizers:
            optimizer.step()


def train_beside(
    rank: int, world_size: int, model: Any, plain: Any, loss: Loss,
    optim: Callable[[Any], Optimizer] = SGD, steps: Iterable[int] = range(3),
) -> None:  # fmt: skip
    """The same, compared after each step."""
    optimizers = [optim(m.parameters()) for m in (model, plain)]
    for step in steps:
        steps_beside(rank, world_size, model, plain, loss, optimizers, [step])
        assert_same(model, plain, f"rank {rank}, step {step}")


def train_parts(
    model: Any, optimizer: Optimizer, parts: Sequence[int], batch: Callable[[int, int], torch.Tensor], steps: range,
    clip: Callable[[float], Any] | None = None,
) -> list[float]:  # fmt: skip
    """Norms of steps of two micro-batches, on ``batch(number, part)`` of a rank's part or of all parts."""
    norms = []
    for step in steps:
        optimizer.zero_grad()
        for micro in range(2):
            if hasattr(model, "set_requires_gradient_sync"):
                model.set_requires_gradient_sync(micro == 1)
            for part in parts:
                (model(batch(2 * step + micro, part)).square().mean() / len(parts)).backward()
        norm = clip(0.05) if clip else nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        norms.append(float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))
        optimizer.step()
    return norms
