"""What runs in the rank processes of one implementation. The model stays there between calls."""

from __future__ import annotations

import gc
import os
import time
from typing import Any, NamedTuple

from tests.figures.gpt import build, loss
from tests.figures.implementations import IMPLEMENTATIONS, Trainer

FIRST_LOSSES = 6


class Block(NamedTuple):
    """What some steps cost one rank.

    Attributes:
        cpu, wall: seconds of the steps; CPU time is that of all threads.
        system: the part of ``cpu`` that was spent in the kernel.
        whole: CPU seconds of the whole call.
    """

    cpu: float
    system: float
    wall: float
    whole: float


class _Run:
    """An implementation in training."""

    def __init__(self, implementation: str, model: str) -> None:
        self.model = model
        self.trainer: Trainer = IMPLEMENTATIONS[implementation](build(model))
        self.count = 0

    def step(self, rank: int) -> Any:
        value = loss(self.model, self.trainer.model, self.count, rank)
        value.backward()
        self.trainer.optimizer.step()
        self.trainer.zero_grad()
        self.count += 1
        return value


_run: _Run | None = None


def prepare(rank: int, implementation: str, model: str) -> list[float]:
    """Builds the implementation; this rank's losses of the first steps."""
    import torch

    global _run
    torch.set_num_threads(1)
    _run = _Run(implementation, model)
    return [_run.step(rank).item() for _ in range(FIRST_LOSSES)]


def forget(rank: int) -> None:
    """Lets the model go."""
    global _run
    _run = None
    gc.collect()


def time_block(rank: int, steps: int) -> Block:
    """Runs steps that all ranks begin together."""
    import torch.distributed as dist

    assert _run is not None, "prepare() comes first"
    entered, run = time.process_time(), _run
    dist.barrier()
    wall, cpu, system = time.perf_counter(), time.process_time(), os.times().system
    for _ in range(steps):
        run.step(rank)
    dist.barrier()  # what ranks still owe each other
    left = time.process_time()
    return Block(
        left - cpu, os.times().system - system, time.perf_counter() - wall, time.process_time() - entered
    )
