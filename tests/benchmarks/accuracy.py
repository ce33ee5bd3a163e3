"""Held-out accuracy with compressed communication beside the same without, over seeds.

    python tests/benchmarks/accuracy.py --seeds 5

Two tasks, each with nested FSDP on two ranks: handwritten digits (360 held-out images), and the next character of
Python source by a small GPT (the last tenth of argparse's is held out). All variants of a seed start alike and see the
same batches.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import mean, stdev
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import torch
from torch import nn
from torch.nn import functional

import digits as handwritten
from shardkit import FSDP, Compression, PrecisionPolicy, ReducePolicy
from shardkit.backends.processes import RankPool
from tests.figures.gpt import GPT

WORLD_SIZE = 2
VARIANTS: dict[str, Compression | None] = {
    "none": None,
    "int8": Compression(),
    "int8, no feedback": Compression(),
    "float8_e4m3fn": Compression(torch.float8_e4m3fn),
    "float8_e5m2": Compression(torch.float8_e5m2),
}


def wrapped(model: nn.Module, variant: str) -> FSDP:
    """Each block a unit, the root the rest."""
    compression = VARIANTS[variant]
    options: dict[str, Any] = {
        "precision": PrecisionPolicy(compression=compression),
        "reduce": ReducePolicy(compression=compression, error_feedback="no feedback" not in variant),
    }
    blocks: Any = model.blocks
    for k, block in enumerate(blocks):
        blocks[k] = FSDP(block, **options)
    return FSDP(model, **options)


def digits(rank: int, variant: str, seed: int, epochs: int = 15) -> float:
    train, held_out = handwritten.load()
    torch.manual_seed(seed)
    model = wrapped(handwritten.DigitTransformer(), variant)
    steps = epochs * (len(train.labels) // 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, total_steps=steps)
    for epoch in range(epochs):
        for images, labels in handwritten.batches(train, epoch, seed, 64, rank, WORLD_SIZE):
            functional.cross_entropy(model(images), labels, label_smoothing=0.1).backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        return float((model(held_out.images).argmax(1) == held_out.labels).float().mean())


def characters(rank: int, variant: str, seed: int, steps: int = 400) -> float:
    text = (
        torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8)
        .long()
        .clamp(max=127)
    )
    cut, length = len(text) * 9 // 10, 64
    torch.manual_seed(seed)
    model = wrapped(GPT(vocabulary=128, context=length, width=96, depth=2, heads=4), variant)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=steps)
    for step in range(steps):
        generator = torch.Generator().manual_seed(100_000 * seed + WORLD_SIZE * step + rank)
        starts = torch.randint(cut - length - 1, (8,), generator=generator).tolist()
        rows = torch.stack([text[k : k + length + 1] for k in starts])
        functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten()).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    model.eval()
    rest = text[cut:]
    rows = rest[: len(rest) // (length + 1) * (length + 1)].view(-1, length + 1)
    with torch.no_grad():
        return float((model(rows[:, :-1]).argmax(-1) == rows[:, 1:]).float().mean())


TASKS: dict[str, Callable[[int, str, int], float]] = {"digits": digits, "characters": characters}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    with RankPool(WORLD_SIZE, timeout=600, environment={"OMP_NUM_THREADS": "1"}) as pool:
        for name, task in TASKS.items():
            print(f"{name}: held-out accuracy over {options.seeds} seeds, mean (deviation); to none, mean")
            truth: list[float] = []
            for variant in VARIANTS:
                found = [float(pool.run(task, variant, seed)[0]) for seed in range(options.seeds)]  # type: ignore[arg-type]
                truth = truth or found
                off = mean(a - b for a, b in zip(found, truth, strict=True))
                spread = stdev(found) if len(found) > 1 else 0.0
                print(f"  {variant:20}{mean(found):8.2%} ({spread:.2%}){off:+9.2%}", flush=True)


if __name__ == "__main__":
    main()
