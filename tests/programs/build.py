"""What both interpreters share: how a program's optimizers are built, and the course's counters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from .models import Model
from .optimizers import OPTIMIZERS, SCHEDULERS, arguments_of, group_options, split_among_optimizers
from .spec import Program, SetTrainable


def late_names(program: Program, model: nn.Module) -> list[str]:
    """Parameters that no optimizer has before the AddGroup step."""
    if not program.options.late:
        return []
    prefix = f"blocks.{len(program.model.blocks) - 1}."
    return [n for n, _ in model.named_parameters() if n.startswith(prefix)]


Construct = Callable[[Any, Any, dict[str, Any]], Optimizer]


def build_optimizers(program: Program, model: nn.Module, construct: Construct) -> list[Optimizer]:
    """The program's optimizers; ``construct(class, params, arguments)`` makes one."""
    spec = program.optimizer
    late = set(late_names(program, model))
    named = {n: p for n, p in model.named_parameters() if n not in late}
    choice = OPTIMIZERS[spec.name]
    built = []
    for names in split_among_optimizers(list(named), program.options.optimizers):
        params = arguments_of(spec, [(n, named[n]) for n in names])
        built.append(construct(choice.cls, params, {"lr": spec.lr, **choice.arguments}))
    return built


def scheduler_for(program: Program, optimizer: Optimizer) -> LRScheduler | None:
    name = program.optimizer.scheduler
    return SCHEDULERS[name](optimizer, program.optimizer.lr) if name else None


class Course:
    """Where a run of a program stands."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.count = 0
        self.late_added = False
        self._trainable: dict[int, bool] = {}

    def next_count(self) -> int:
        """A number for the next forward; its batch depends on it."""
        self.count += 1
        return self.count

    def seed(self, count: int, rank: int) -> None:
        """Dropout masks depend on forward and rank only."""
        torch.manual_seed(self.program.data_seed * 7919 + count * 97 + rank)

    def set_trainable(self, model: Model, step: SetTrainable) -> None:
        self._trainable[step.block] = step.trainable
        model.blocks[step.block].requires_grad_(step.trainable)

    def apply_trainable(self, model: Model) -> None:
        """Repeats earlier :class:`SetTrainable` steps on a fresh model."""
        for block, trainable in self._trainable.items():
            model.blocks[block].requires_grad_(trainable)

    def add_late(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        named = dict(model.named_parameters())
        late = [(n, named[n]) for n in late_names(self.program, model)]
        for _, p in late:
            p.requires_grad_(True)
        spec = self.program.optimizer
        with_names = spec.form in ("named", "named_groups")
        params = late if with_names else [p for _, p in late]
        optimizers[-1].add_param_group({"params": params, **group_options(spec, 4)})
        self.late_added = True
