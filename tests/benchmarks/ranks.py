"""What runs in the rank processes of one implementation. The model stays there between calls."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from tests.figures.counters import CallCounter, OperationCounter, quiet_collector
from tests.figures.gpt import build, loss
from tests.figures.implementations import IMPLEMENTATIONS, Trainer

FIRST_LOSSES = 4
_WARM = 3  # the optimizer's state exists, DDP has rearranged its buckets


class Block(NamedTuple):
    """What some steps cost one rank.

    Attributes:
        cpu, wall: seconds of the steps; CPU time is that of all threads.
        whole: CPU seconds of the whole call.
    """

    cpu: float
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


def _current() -> _Run:
    assert _run is not None, "prepare() comes first"
    return _run


def prepare(rank: int, implementation: str, model: str) -> list[float]:
    """Builds the implementation; this rank's losses of the first steps."""
    import torch

    global _run
    torch.set_num_threads(1)
    _run = _Run(implementation, model)
    return [_run.step(rank).item() for _ in range(FIRST_LOSSES)]


def count(rank: int) -> dict[str, float]:
    """Counted figures of a step: dispatched ATen operations, Python calls, collectives, bytes to send."""
    import torch.distributed as dist

    run = _current()
    for _ in range(_WARM):
        run.step(rank)
    with quiet_collector():
        with OperationCounter(dist.get_world_size()) as operations:
            run.step(rank)
        with CallCounter() as calls:
            run.step(rank)
    return {
        "operations": operations.operations,
        "calls": calls.calls,
        "collectives": sum(operations.collectives.values()),
        "sent": operations.sent,
    }


def time_block(rank: int, steps: int) -> Block:
    """Runs steps that all ranks begin together."""
    import torch.distributed as dist

    entered, run = time.process_time(), _current()
    dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(steps):
        run.step(rank)
    left = time.process_time()
    return Block(left - cpu, time.perf_counter() - wall, left - entered)


def versions(rank: int) -> dict[str, str]:
    """What is compared with what."""
    from importlib import metadata

    import torch

    try:
        fairscale = metadata.version("fairscale")
    except metadata.PackageNotFoundError:
        fairscale = ""
    return {"torch": torch.__version__, "fairscale": fairscale}
