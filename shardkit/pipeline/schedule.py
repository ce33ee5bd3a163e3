"""Micro-batches through the partitions of a pipeline, in the order of GPipe (Huang et al. 2019, arXiv 1811.06965).

[Note: cells in clock order] Cell (i, j) is micro-batch i in partition j. At tick k run the cells with i + j = k, which
don't depend on each other::

    tick   cells of 3 micro-batches and 3 partitions
    0      (0,0)
    1      (1,0) (0,1)
    2      (2,0) (1,1) (0,2)
    3            (2,1) (1,2)
    4                  (2,2)

One thread issues them all. Where kernels are launched and not waited for, devices work on their cells of a tick at the
same time; on the host nothing would overlap in threads either. Autograd takes what is ready latest first, so backward
runs the ticks in reverse, without any order of its own having to be written into the graph.

[Note: skip connections] A cell is a function of a micro-batch and the skip tensors that its partition pops from earlier
ones; it returns the micro-batch and what it has stashed and not popped. So skip tensors are arguments and results, move
from device to device as the micro-batch does, and their gradients go the reverse way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from ..tracing.ranges import Phase
from ..wrapping.activations import call_checkpointed
from .microbatch import Value, check
from .skip import Skips, arriving_keys, holding


def ticks(m: int, n: int) -> Iterator[list[tuple[int, int]]]:
    """Yields lists of cells (micro-batch, partition) that run at the same time, of m micro-batches and n partitions."""
    for k in range(m + n - 1):
        yield [(k - j, j) for j in range(max(0, k + 1 - m), min(k + 1, n))]


def checkpointed_cells(checkpoint: str, micro_batches: int) -> int:
    """Returns how many of the micro-batches, counted from the first, keep no activations."""
    return {"always": micro_batches, "except_last": micro_batches - 1, "never": 0}[checkpoint]


def run_cell(
    layers: nn.Sequential, value: Value, skips: Skips, label: str, *, checkpoint: bool
) -> tuple[Value, Skips]:
    """Sends a micro-batch through a partition; returns it with the skip tensors that later partitions pop."""

    def call(value: Value, skips: Skips) -> tuple[Value, Skips]:
        with holding(dict(skips)) as held, Phase(f"shardkit::{label}"):
            output = layers(value)
        check(output)
        return output, held

    if not checkpoint:
        return call(value, skips)
    return call_checkpointed(call, (value, skips), {}, near=layers)  # type: ignore[no-any-return]


def move(value: Value, device: torch.device) -> Value:
    """Moves to another device, differentiably; the copy is not waited for."""
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=device.type != "cpu")
    return tuple(t.to(device, non_blocking=device.type != "cpu") for t in value)


class Pipeline:
    """Partitions on devices, and the order in which micro-batches go through them.

    Args:
        partitions: one for each device; their parameters are there.
        checkpoint: which micro-batches keep no activations: "always", "except_last", "never".
    """

    def __init__(
        self, partitions: Sequence[nn.Sequential], devices: Sequence[torch.device], checkpoint: str
    ) -> None:
        self._partitions = partitions
        self._devices = devices
        self._checkpoint = checkpoint
        self._arriving = arriving_keys(partitions)

    def run(self, values: Sequence[Value]) -> list[Value]:
        """Returns micro-batches after the last partition, on its device."""
        values = list(values)
        skips: list[Skips] = [{} for _ in values]
        # As fairscale's: the first partition says whether the module is in training mode.
        training = self._partitions[0].training
        stop = checkpointed_cells(self._checkpoint, len(values)) if training else 0
        for tick in ticks(len(values), len(self._partitions)):
            # Copies first: behind a cell of this tick they would wait for it.
            arrived = [self._fetch(i, j, values, skips) for i, j in tick]
            # A cell on the host keeps this thread busy: others are launched before.
            for (i, j), came in sorted(
                zip(tick, arrived, strict=True), key=lambda c: self._devices[c[0][1]].type == "cpu"
            ):
                values[i], left = run_cell(
                    self._partitions[j], values[i], came, f"chunk{i}-part{j}", checkpoint=i < stop
                )
                skips[i].update(left)
        return values

    def _fetch(self, i: int, j: int, values: list[Value], skips: list[Skips]) -> Skips:
        """Brings a micro-batch to a partition's device, and the skip tensors popped there, which are returned."""
        device = self._devices[j]
        values[i] = move(values[i], device)
        came = {key: skips[i].pop(key) for key in self._arriving[j]}
        return {key: None if t is None else move(t, device) for key, t in came.items()}  # type: ignore[misc]
