"""Native all-reduce training, torch's DDP, shardkit's ShardedDDP and FSDP, and torch_xla's FSDP, side by side on XLA.

    python tests/benchmarks/xla_training.py --world-size 2 --rounds 10

The same replicas train all of them by turns, with the collectives of a TPU. Printed are the medians over rounds, with
95 % intervals, of what each takes of native training's CPU time (of all replicas, the runtime's threads included) while
Python records a step ("tracing"), while the compiled program runs ("execution"), and in both. Then images per second of
single steps, in the columns of PyTorch/XLA's guide to DDP, and what is lost to native training. Beside that, what is
the same in every run: programs compiled, collectives in a step's program, Python calls and recorded operations.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from torch import nn

from tests.benchmarks.ratios import with_interval
from tests.benchmarks.xla_trainers import (
    DDP,
    NAMES,
    NATIVE,
    SHARDED_DDP,
    TASKS,
    Task,
    Trainer,
    batch,
    collectives_of_a_tpu,
    trainer,
)

WARM_UP = 4


class Runner:
    """One trainer in one replica, warmed up.

    Attributes:
        losses: of all steps so far.
        compiles: programs that the first steps needed.
        prepare_sync: called before each sync.
    """

    def __init__(self, task: Task, made: Trainer, rank: int, prepare_sync: Callable[[], None]) -> None:
        from shardkit.backend import get_backend

        self._backend = get_backend("xla")
        self._meet = self._backend.group().all_gather_object
        self._trainer, self.prepare_sync = made, prepare_sync
        device = self._backend.device()
        self._batches = [tuple(t.to(device) for t in batch(task, count, rank)) for count in range(4)]
        self.losses: list[torch.Tensor] = []
        self.execute()
        before = self._compiles_so_far()
        for _ in range(WARM_UP):
            self.record()
            self.execute()
        self.compiles = self._compiles_so_far() - before

    def _compiles_so_far(self) -> int:
        from shardkit.backends.xla import metrics

        self._meet(None)  # the counter is the process's
        count = metrics.compiles()
        self._meet(None)
        return count

    def record(self) -> None:
        """A step's operations."""
        images, labels = self._batches[len(self.losses) % len(self._batches)]
        self._trainer.zero_grad()
        loss = nn.functional.cross_entropy(self._trainer.model(images), labels)
        loss.backward()
        self._trainer.update()
        self.losses.append(loss.detach())

    def execute(self) -> None:
        """Runs what was recorded."""
        self.prepare_sync()
        self._backend.mark_step(wait=True)

    def facts(self) -> dict[str, Any]:
        """Trains a step; what doesn't depend on the machine."""
        from tests.xla import pending_program

        calls = sum(counting_calls(self.record, self._batches[0][0].device))
        pending = [self.losses[-1], *self._trainer.state()]
        found = {
            "compiles": self.compiles,
            "collectives": dict(pending_program.collectives(pending)),
            "calls": calls,
            "operations": pending_program.operations(pending),
        }
        self.execute()
        return {**found, "losses": [x.item() for x in self.losses]}

    def timed(self, steps: int) -> tuple[float, float, float]:
        """(tracing, execution, wall) seconds a step."""
        tracing = execution = wall = 0.0
        for _ in range(steps):
            self._meet(None)
            start, began = time.process_time(), time.perf_counter()
            self.record()
            self._meet(None)  # the clock is the process's
            traced = time.process_time()
            self.execute()
            self._meet(None)
            execution += time.process_time() - traced
            tracing += traced - start
            wall += time.perf_counter() - began
        return tracing / steps, execution / steps, wall / steps


def counting_calls(run: Callable[[], None], device: torch.device) -> tuple[int, int]:
    """Calls of Python functions while it runs: in this thread, and in the one where the device's backward runs."""
    calls = {"here": 0, "backward": 0}

    def counting(thread: str) -> Callable[[Any, str, Any], None]:
        def count(_: Any, event: str, __: Any) -> None:
            calls[thread] += event == "call"

        return count

    _in_backward(device, lambda: sys.setprofile(counting("backward")))
    sys.setprofile(counting("here"))
    try:
        run()
    finally:
        sys.setprofile(None)
        _in_backward(device, lambda: sys.setprofile(None))
    return calls["here"], calls["backward"]


def _in_backward(device: torch.device, act: Callable[[], None]) -> None:
    """Acts in the thread that autograd has for a device; its Python state lasts, as what is set there does."""
    leaf = torch.zeros((), device=device, requires_grad=True)
    leaf.register_hook(lambda _: act())
    (leaf * 1).backward()


def train(rank: int, task_name: str, names: tuple[str, ...], rounds: int, steps: int) -> dict[str, Any]:
    """What a replica saw: for each trainer its facts, and times by round (these change the process for good)."""
    import torch.distributed as dist

    from shardkit.backend import get_backend

    backend, task = get_backend("xla"), TASKS[task_name]
    dist.init_process_group("xla", init_method="xla://")
    runners = {}
    if DDP in names:  # its first steps read what they reduce, for which collectives on a CPU need ids
        runners[DDP] = Runner(task, trainer(DDP, task, backend.device()), rank, lambda: None)
    with collectives_of_a_tpu(unwatched=rounds > 0) as prepare_sync:
        for name in names:
            if name == DDP:
                runners[DDP].prepare_sync = prepare_sync
            else:
                made = trainer(name, task, backend.device())
                backend.mark_step(wait=True)  # torch_xla cuts shards by rank: not one program for all
                runners[name] = Runner(task, made, rank, prepare_sync)
        runners = {name: runners[name] for name in names}
        facts = {name: runner.facts() for name, runner in runners.items()}
        times: dict[str, list[tuple[float, float, float]]] = {name: [] for name in names}
        for number in range(rounds):
            for name in names if number % 2 else reversed(names):
                times[name].append(runners[name].timed(steps))
    dist.destroy_process_group()
    return {"facts": facts, "times": times}


def rates_of(walls: Sequence[float], images: int) -> dict[str, float]:
    """The guide's columns, of the images per second of each step.

    Args:
        walls: seconds of the steps.
        images: of a step, over all ranks.
    """
    rates = sorted(images / wall for wall in walls)
    mean, spread = statistics.mean(rates), statistics.stdev(rates)
    return {
        "Mean": mean,
        "Median": statistics.median(rates),
        "90th %": rates[min(len(rates) - 1, round(0.9 * (len(rates) - 1)))],
        "Std Dev": spread,
        "CV": spread / mean,
    }


def rates(task_name: str, times: dict[str, list[tuple[float, float, float]]], world_size: int) -> list[str]:
    """Lines of the guide's table, of the wall times of all rounds."""
    images = TASKS[task_name].batch * world_size
    columns = {name: rates_of([wall for _, _, wall in mine], images) for name, mine in times.items()}
    lines = [
        f"  {'images / s':16}"
        + "".join(f"{head:>10}" for head in columns[NATIVE])
        + "  1 - median / native's"
    ]
    for name, column in columns.items():
        lost = 1 - column["Median"] / columns[NATIVE]["Median"]
        lines.append(
            f"  {name:16}" + "".join(f"{value:10.2f}" for value in column.values()) + f"  {lost:.2%}"
        )
    return lines


def report(task_name: str, result: dict[str, Any], world_size: int) -> None:
    """Prints one model's rows."""
    facts, times = result["facts"], result["times"]
    print(f"{task_name}: CPU time relative to native, median [95 % interval]")
    print(f"  {'':16} {'tracing':22} {'execution':22} {'together':22} tracing  execution")
    for name, mine in times.items():
        native = times[NATIVE]
        shares = [
            str(with_interval([of(a) / of(b) for a, b in zip(mine, native, strict=True)]))
            for of in (lambda t: t[0], lambda t: t[1], lambda t: t[0] + t[1])
        ]
        medians = [1000 * statistics.median(t[index] for t in mine) for index in (0, 1)]
        print(
            f"  {name:16} {shares[0]:22} {shares[1]:22} {shares[2]:22} {medians[0]:6.1f} ms {medians[1]:7.1f} ms"
        )
    print("\n".join(rates(task_name, times, world_size)))
    print(f"  {'':16} compiles  calls  operations  losses' difference  collectives")
    for name, fact in facts.items():
        far = max(abs(a - b) / abs(b) for a, b in zip(fact["losses"], facts[NATIVE]["losses"], strict=True))
        counts = f"{fact['compiles']:8} {fact['calls']:6} {fact['operations']:11}"
        print(f"  {name:16} {counts} {far:19.1e}  {fact['collectives']}")
    if SHARDED_DDP in times:
        print(
            f"  gate: ShardedDDP loses at most {TASKS[task_name].gate:.0%} of native, with as many compiles\n"
        )


def main() -> None:
    """Runs all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=2, help="steps a round")
    parser.add_argument("--model", choices=TASKS, action="append")
    parser.add_argument("--only", choices=NAMES, action="append", help="besides native")
    options = parser.parse_args()
    from shardkit.backends.xla.pool import ReplicaPool

    names = tuple(n for n in NAMES if not options.only or n in (NATIVE, *options.only))
    for name in options.model or ("mnist", "resnet"):
        # else the compiler takes minutes for a residual network; convolutions are a library's anyway
        variables = {"XLA_FLAGS": "--xla_backend_optimization_level=0"}
        with ReplicaPool(options.world_size, timeout=None, environment=variables) as pool:
            found = pool.run(train, name, names, options.rounds, options.steps)[0]
            report(name, found, options.world_size)


if __name__ == "__main__":
    main()
