"""FSDP beside torch_xla's own, on XLA replicas: the same replicas train both by turns.

    python tests/benchmarks/xla_fsdp.py --world-size 2 --rounds 6

Prints what shardkit's FSDP takes of torch_xla's time, as the median over rounds with its 95 % interval: CPU time of all
replicas and of the runtime's threads together, while Python records a step ("tracing"), and while the compiled program
runs ("execution"). Beside that: the difference of losses, and the collectives in a step's program.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from torch import nn

from shardkit import FSDP, ReshardPolicy
from shardkit.backend import get_backend
from tests.benchmarks.ratios import with_interval
from tests.figures import gpt

MODELS = ("gpt", "tinymlp")
OURS, THEIRS = "shardkit", "torch_xla"
Step = Callable[[int], torch.Tensor]


def build(name: str) -> nn.Module:
    """The model with its layers as they are wrapped: blocks, or ten small layers at a time."""
    model = gpt.build(name)
    if name == "tinymlp":
        for p in model.parameters():  # else 200 layers make numbers large
            p.data.mul_(0.1)
        layers = list(model.layers)  # type: ignore[arg-type]
        return nn.Sequential(*(Ten(layers[i : i + 10]) for i in range(0, len(layers), 10)))
    return model


class Ten(nn.Module):
    """Some of the layers of TinyMLP."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.inner = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.inner:
            x = torch.relu(layer(x)) + x
        return x


def wrapped(name: str, which: str, reshard: bool) -> nn.Module:
    """A unit for each block, and the root."""
    model = build(name).to(get_backend("xla").device())
    wrap: Callable[[nn.Module], nn.Module]
    if which == OURS:
        wrap = lambda m: FSDP(m, reshard=ReshardPolicy(after_forward=reshard))  # noqa: E731
    else:
        from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel

        wrap = lambda m: XlaFullyShardedDataParallel(  # noqa: E731
            m, reshard_after_forward=reshard, flatten_parameters=True, pin_layout_in_collective_ops=False
        )
    blocks: Any = model if name == "tinymlp" else model.blocks
    for k, block in enumerate(blocks):
        blocks[k] = wrap(block)
    return wrap(model)


def stepper(name: str, model: nn.Module, rank: int) -> Step:
    """Records one step of training; returns the loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    device = get_backend("xla").device()
    batches = [_batch(name, count, rank, device) for count in range(4)]

    def step(count: int) -> torch.Tensor:
        inputs, targets = batches[count % len(batches)]
        optimizer.zero_grad()
        outputs = model(inputs)
        if name == "gpt":
            loss = nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())
        else:
            loss = outputs.square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def _batch(name: str, count: int, rank: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(count * 131 + rank)
    if name == "gpt":
        tokens = torch.randint(0, gpt.VOCABULARY, (gpt.BATCH, gpt.LENGTH + 1), generator=generator)
        return tokens[:, :-1].contiguous().to(device), tokens[:, 1:].contiguous().to(device)
    x = torch.randn(16, 32, generator=generator).to(device)
    return x, x


def train(rank: int, name: str, reshard: bool, rounds: int, steps: int) -> dict[str, Any]:
    """What a replica saw: losses, collectives, and for each round (tracing, execution, wall) seconds a step."""
    from shardkit.backends.xla import metrics

    backend = get_backend("xla")
    models = {which: wrapped(name, which, reshard) for which in (OURS, THEIRS)}
    step = {which: stepper(name, model, rank) for which, model in models.items()}
    losses: dict[str, list[float]] = {OURS: [], THEIRS: []}
    collectives = {}
    for which, model in models.items():
        for count in range(3):  # compiles
            loss = step[which](count)
            if count == 2:
                collectives[which] = dict(metrics.collectives([loss, *model.parameters()]))
            backend.mark_step(wait=True)
            losses[which].append(loss.item())
    times: dict[str, list[tuple[float, float, float]]] = {OURS: [], THEIRS: []}
    for number in range(rounds):
        for which in (OURS, THEIRS) if number % 2 else (THEIRS, OURS):
            times[which].append(_timed(step[which], steps))
    return {"losses": losses, "collectives": collectives, "times": times}


def _timed(step: Step, steps: int) -> tuple[float, float, float]:
    backend = get_backend("xla")
    group = backend.group()
    tracing = execution = wall = 0.0
    for count in range(steps):
        group.all_gather_object(None)
        start, began = time.process_time(), time.perf_counter()
        step(count)
        group.all_gather_object(None)  # the clock is the process's
        traced = time.process_time()
        backend.mark_step(wait=True)
        group.all_gather_object(None)
        execution += time.process_time() - traced
        tracing += traced - start
        wall += time.perf_counter() - began
    return tracing / steps, execution / steps, wall / steps


def report(name: str, reshard: bool, result: dict[str, Any]) -> None:
    """Prints one model's rows."""
    ours, theirs = result["times"][OURS], result["times"][THEIRS]
    difference = max(
        abs(a - b) / b for a, b in zip(result["losses"][OURS], result["losses"][THEIRS], strict=True)
    )
    print(f"{name}, {'resharding' if reshard else 'keeping parameters'} after forward")
    for index, what in enumerate(("tracing", "execution", "wall")):
        shown = with_interval([a[index] / b[index] for a, b in zip(ours, theirs, strict=True)])
        mine, other = (1000 * sorted(t[index] for t in times)[len(times) // 2] for times in (ours, theirs))
        print(f"  {what:10} {shown}   {mine:8.1f} ms to {other:8.1f} ms")
    both = with_interval([(a[0] + a[1]) / (b[0] + b[1]) for a, b in zip(ours, theirs, strict=True)])
    print(f"  {'together':10} {both}")
    print(f"  losses differ by {difference:.1e}; collectives {result['collectives']}")


def main() -> None:
    """Runs all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=3, help="steps a round")
    parser.add_argument("--model", choices=MODELS, action="append")
    options = parser.parse_args()
    from shardkit.backends.xla.pool import ReplicaPool

    for name in options.model or MODELS:
        for reshard in (True, False):
            with ReplicaPool(options.world_size, timeout=None) as pool:
                report(name, reshard, pool.run(train, name, reshard, options.rounds, options.steps)[0])


if __name__ == "__main__":
    main()
