"""The table of PyTorch/XLA's guide to DDP, on XLA replicas: rates of native training beside those of a wrapper.

    python tests/benchmarks/xla_ddp_table.py --world-size 2 --rounds 20

As the guide does: images per second of single steps, and 1 - DDP / native; for MNIST on real data the accuracy too.
Here all types train by turns in the same replicas, so that what else the machine does hits them alike. Ratios of step
times and of CPU times (of all replicas together, which other programs hardly change) are medians over rounds, with 95 %
intervals. ShardedDDP stands beside DDP. Real data are MNIST's files where /tmp/mnist-data has them, else scikit-learn's
digits. The ResNet has ResNet-50's stages with a quarter of its channels and half of its blocks, and images of 32 x 32:
what replicas on a CPU can run.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import torch

from tests.benchmarks import xla_training
from tests.benchmarks.ratios import with_interval
from tests.benchmarks.xla_trainers import DDP, NATIVE, SHARDED_DDP, TASKS

TYPES = {NATIVE: "xm.optimizer_step", DDP: "DDP", SHARDED_DDP: "ShardedDDP"}
STRATEGIES = {NATIVE: "native", DDP: "ddp", SHARDED_DDP: "sharded_ddp"}
# Else the compiler takes minutes for a residual network; convolutions are a library's anyway.
VARIABLES = {"XLA_FLAGS": "--xla_backend_optimization_level=0"}
ROWS = {
    "resnet": "ResNet with fake data",
    "mnist": "MNIST with fake data",
    "mnist, real data": "MNIST with real data",
}


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


def report(task_name: str, times: dict[str, list[tuple[float, float, float]]], world_size: int) -> list[str]:
    """Lines of one of the tables."""
    walls = {name: [wall for _, _, wall in mine] for name, mine in times.items()}
    columns = {name: rates_of(mine, TASKS[task_name].batch * world_size) for name, mine in walls.items()}
    heads = list(columns[NATIVE])
    lines = [
        f"{ROWS[task_name]}, images per second on {world_size} replicas",
        f"  {'Type':18}"
        + "".join(f"{head:>10}" for head in heads)
        + f"{'ms a step':>12}   {'step time / native':22} CPU time / native",
    ]
    for name, column in columns.items():
        wall = with_interval([a / b for a, b in zip(walls[name], walls[NATIVE], strict=True)])
        cpu = with_interval(
            [sum(a[:2]) / sum(b[:2]) for a, b in zip(times[name], times[NATIVE], strict=True)]
        )
        cells = "".join(f"{column[head]:10.2f}" for head in heads)
        lines.append(
            f"  {TYPES[name]:18}{cells}{1000 * statistics.mean(walls[name]):12.1f}   {wall!s:22} {cpu}"
        )
    for name, column in columns.items():
        if name != NATIVE:
            lost = 1 - column["Median"] / columns[NATIVE]["Median"]
            lines.append(f"  1 - {TYPES[name]} / {TYPES[NATIVE]} = {lost:.2%} (of the medians)")
    return lines


def accuracies(world_size: int, epochs: int) -> list[str]:
    """What each type reaches on real data, in single lines; the saved model is tested in one process."""
    import images
    import mnist
    import training
    from shardkit.backends.xla import ReplicaPool
    from training import parse

    lines = [f"MNIST with real data, after {epochs} epochs"]
    with tempfile.TemporaryDirectory() as folder, ReplicaPool(world_size, environment=VARIABLES) as pool:
        for name in TYPES:
            flags = [
                "--backend",
                "xla",
                "--ranks",
                str(world_size),
                "--strategy",
                STRATEGIES[name],
                "--drop_last",
            ]
            options = parse(mnist.parser(), [*flags, "--num_epochs", str(epochs)])
            task = mnist.task(images.of_mnist(options))
            torch.manual_seed(options.seed)
            prefix = str(Path(folder) / options.strategy)
            outcome = pool.run(training.train, task, options, task.model().state_dict(), prefix)[0]
            alone = training.accuracy_of_saved(task, options, prefix)
            lines.append(
                f"  {TYPES[name]:18} accuracy {outcome.accuracy:.2%}, of the saved model alone {alone:.2%}"
            )
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    """Prints all tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20, help="steps of each type")
    parser.add_argument("--epochs", type=int, default=5, help="for accuracies; 0: none")
    parser.add_argument("--row", choices=ROWS, action="append")
    options = parser.parse_args(argv)
    from shardkit.backends.xla import ReplicaPool

    for row in options.row or ROWS:
        with ReplicaPool(options.world_size, timeout=1800, environment=VARIABLES) as pool:
            results: list[dict[str, Any]] = pool.run(xla_training.train, row, tuple(TYPES), options.rounds, 1)
        print("\n".join([*report(row, results[0]["times"], options.world_size), ""]), flush=True)
    if options.epochs:
        print("\n".join(accuracies(options.world_size, options.epochs)))


if __name__ == "__main__":
    main()
