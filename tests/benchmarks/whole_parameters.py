"""One optimizer step over sharded parameters beside the same step in one process.

    python tests/benchmarks/whole_parameters.py --optimizers Muon,AdamW --world-sizes 2,4 --width 512

Blocks of transformers, one FSDP unit each. Gradients are made by one backward; steps are repeated. "cpu" is the CPU
time of the busiest rank, which is what counts where ranks share cores; "wall" is that of the slowest. "sent" is what a
rank sends, the most of all, as a share of the bytes of all parameters. With perfect balance and nothing to send, cpu is
one process's divided by the number of ranks.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from torch import nn

import shardkit
from tests.figures.counters import OperationCounter


class Step(NamedTuple):
    """Of one rank: seconds, and the share of all parameters' bytes that it sends."""

    cpu: float
    wall: float
    sent: float


def build(width: int, depth: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.TransformerEncoderLayer(width, 8, 4 * width, 0.0, batch_first=True) for _ in range(depth))
    )


def measure(rank: int, world_size: int, name: str, width: int, depth: int, align: Any, steps: int) -> Step:
    torch.set_num_threads(1)
    model: Any = build(width, depth)
    numel = sum(p.numel() for p in model.parameters())
    if world_size > 1:
        for k in range(depth):
            model[k] = shardkit.FSDP(model[k], align=align)
        model = shardkit.FSDP(model, align=align)
    optimizer = shardkit.WholeParameters(model, getattr(torch.optim, name), lr=1e-3)
    model(torch.randn(1, 8, width)).pow(2).mean().backward()
    optimizer.step()
    times = []
    for _ in range(steps):
        wall, cpu = time.perf_counter(), time.process_time()
        optimizer.step()
        times.append((time.process_time() - cpu, time.perf_counter() - wall))
    with OperationCounter(world_size) as counter:
        optimizer.step()
    cpu, wall = (statistics.median(t) for t in zip(*times, strict=True))
    return Step(cpu, wall, counter.sent / (4 * numel))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--optimizers", default="Muon,Adafactor,AdamW")
    parser.add_argument("--world-sizes", default="2,4")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--align", default=None, help="parameters, rows or a number")
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    align = int(options.align) if options.align and options.align.isdigit() else options.align
    print(f"{'optimizer':12} {'ranks':>5} {'cpu ms':>9} {'of one':>7} {'wall ms':>9} {'sent':>7}")
    for name in options.optimizers.split(","):
        one = None
        for world_size in (1, *map(int, options.world_sizes.split(","))):
            sizes = (world_size, name, options.width, options.depth, align, options.steps)
            found = shardkit.launch(measure, world_size, args=sizes)
            cpu, wall, sent = (max(values) for values in zip(*found, strict=True))
            one = one or cpu
            print(
                f"{name:12} {world_size:5} {1e3 * cpu:9.1f} {cpu / one:7.2f} {1e3 * wall:9.1f} {sent:7.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
