"""How the learning rate goes on."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR

from .flags import WARMUP_AND_DECAY


@dataclass(frozen=True)
class WarmupAndDecay:
    """The factor of a step: grows from 0 to 1 over the first epochs; later it is divided every so many epochs.

    Attributes:
        steps: of an epoch.
        warmup: epochs, a part of one too.
        every: epochs.
        divisor: what it is divided by.
    """

    steps: int
    warmup: float
    every: int
    divisor: float

    def __call__(self, step: int) -> float:
        warmup = self.warmup * self.steps
        if step < warmup:
            return min(1.0, (step + 1) / warmup)
        return self.divisor ** -(step // self.steps // self.every)


def constant(step: int) -> float:
    """The factor of a rate that stays."""
    return 1.0


def make_schedule(options: Namespace, optimizer: Optimizer, steps: int) -> LRScheduler:
    """What ``--lr_scheduler_type`` says, for epochs of so many steps; it is asked after every step."""
    if options.lr_scheduler_type == "OneCycleLR":
        total = options.num_epochs * steps
        return OneCycleLR(optimizer, max_lr=options.lr, total_steps=total, cycle_momentum=False)
    if options.lr_scheduler_type == WARMUP_AND_DECAY:
        factor = WarmupAndDecay(
            steps, options.num_warmup_epochs, options.lr_scheduler_divide_every_n_epochs,
            options.lr_scheduler_divisor,
        )  # fmt: skip
        return LambdaLR(optimizer, factor)
    return LambdaLR(optimizer, constant)
