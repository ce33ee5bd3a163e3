"""What all runs of a program share: counters of forwards, batches, the optimizer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from tests.programs.models import batch, loss_of, route
from tests.programs.optimizers import OPTIMIZERS
from tests.programs.spec import ModelSpec as PlainSpec

from .spec import ModelSpec, Program


def tensors_of(spec: ModelSpec, seed: int, count: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs [B, D] and targets [B] of one rank for the ``count``-th forward."""
    return batch(PlainSpec((), spec.width, spec.dtype), seed, count, rank)


class Course:
    """Where a run of a program stands."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.index = 0
        self.count = 0

    def next_count(self) -> int:
        """A number for the next forward; its batch depends on it."""
        self.count += 1
        return self.count

    def next_index(self) -> int:
        """Number of the next step."""
        self.index += 1
        return self.index - 1

    def loss(self, model: Any, count: int, rank: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Of a rank's batch; dropout masks depend on forward and rank only."""
        program = self.program
        x, y = tensors_of(program.model, program.data_seed, count, rank)
        torch.manual_seed(program.data_seed * 7919 + count * 97 + rank)
        return loss_of(
            model(x if dtype is None else x.to(dtype), route=route(program.routing, count, rank)), y
        )

    def make_optimizer(self, params: Iterable[nn.Parameter]) -> Optimizer:
        spec = self.program.optimizer
        choice = OPTIMIZERS[spec.name]
        listed = list(params)
        if spec.groups == 1:
            return choice.cls(listed, lr=spec.lr, **choice.arguments)
        # All groups have the same rate: which parameters share a group depends on how they are flattened.
        groups = [{"params": listed[i :: spec.groups], "lr": spec.lr} for i in range(spec.groups)]
        return choice.cls([g for g in groups if g["params"]], lr=spec.lr, **choice.arguments)
