"""A sequential module whose parts are on several devices and work on micro-batches at the same time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from ..tracing.ranges import Phase
from ..wrapping.activations import call_checkpointed, patch_batchnorm
from .microbatch import (
    ADVICE,
    BalanceError,
    DeferredBatchNorm,
    PipeTypeError,
    Value,
    check,
    check_balance,
    check_checkpoint,
    expect_micro_batches,
    join,
    split,
    split_module,
    verify_module,
    verify_shared_parameters,
)
from .skip import Skips, arriving_keys, holding, verify_skippables

Device = torch.device | int | str
MOVING_DENIED = PipeTypeError(
    "denied to move parameters and buffers, because Pipe should manage device placement; pass devices=[...] to Pipe"
)


class Pipe(nn.Module):
    """GPipe (Huang et al. 2019, arXiv 1811.06965): pipeline parallelism with checkpointing, in one process::

        model = Pipe(nn.Sequential(a, b, c, d), balance=[2, 2], devices=["cuda:0", "cuda:1"], chunks=8)
        output = model(input)

    Losses and gradients are those of the plain module; so are running statistics, with ``chunks=1`` or
    ``deferred_batch_norm``. Outputs are on ``devices[-1]``.

    Args:
        module: it is moved to the devices part by part; names in state dicts are ``partitions.<n>.<name>``.
        balance: number of layers in each partition.
        devices: of the partitions; default: all of the accelerator. One may be named several times.
        chunks: micro-batches that a mini-batch is cut into along its first dimension.
        checkpoint: which micro-batches keep only their inputs and compute activations again in backward: "always",
            "except_last" (backward begins with it right away) or "never". Random layers draw the same numbers, and
            batch norms update their statistics once.
        deferred_batch_norm: running statistics of mini-batches, not of micro-batches.

    Raises:
        PipeTypeError: (a TypeError) the module is not sequential, or its skip connections don't match.
        ConfigurationError: (a ValueError) wrong numbers or names.
        TooFewDevicesError: (an IndexError) fewer devices than partitions.
    """

    balance: list[int] = []  # noqa: RUF012  # fairscale's class attributes
    devices: list[torch.device] = []  # noqa: RUF012
    chunks: int = 1
    checkpoint: str = "except_last"

    def __init__(
        self,
        module: nn.Sequential,
        balance: Iterable[int] | None = None,
        *,
        devices: Iterable[Device] | None = None,
        chunks: int = chunks,
        checkpoint: str = checkpoint,
        deferred_batch_norm: bool = False,
    ) -> None:
        super().__init__()
        self.chunks, self.checkpoint = int(chunks), str(checkpoint)
        if balance is None:
            raise BalanceError(f"balance is required: the number of layers in each partition{ADVICE}")
        check_checkpoint(self.checkpoint, self.chunks)
        verify_module(module)
        verify_skippables(module)
        self.balance = list(balance)
        if devices is None and (kind := torch.accelerator.current_accelerator(check_available=True)):
            devices = [torch.device(kind.type, i) for i in range(torch.accelerator.device_count())]
        self.devices = [torch.device(d) for d in devices or ()]
        check_balance(len(module), self.balance, len(self.devices), "devices")
        del self.devices[len(self.balance) :]
        if deferred_batch_norm:
            module = DeferredBatchNorm.convert_deferred_batch_norm(module, self.chunks)
        partitions = split_module(module, self.balance)
        verify_shared_parameters(partitions, self.devices)
        for partition, device in zip(partitions, self.devices, strict=True):
            partition.to(device)
            if self.checkpoint != "never":
                patch_batchnorm(partition)
        self.partitions = nn.ModuleList(partitions)
        self._arriving = arriving_keys(partitions)

    def __len__(self) -> int:
        return sum(self.balance)

    def __getitem__(self, index: int) -> nn.Module:
        return list(self)[index]

    def __iter__(self) -> Iterator[nn.Module]:
        for partition in self.partitions:
            yield from partition  # type: ignore[misc]

    def cuda(self, device: Device | None = None) -> Pipe:
        """Refuses: partitions stay where they are. Raises PipeTypeError (a TypeError)."""
        raise MOVING_DENIED

    def cpu(self) -> Pipe:
        """Refuses, as :meth:`cuda`."""
        raise MOVING_DENIED

    def to(self, *args: Any, **kwargs: Any) -> Pipe:
        """Changes the dtype; to another device is refused, as :meth:`cuda`."""
        where = (torch.device, int, str, torch.Tensor)
        if kwargs.keys() & {"device", "tensor"} or (args and isinstance(args[0], where)):
            raise MOVING_DENIED
        return super().to(*args, **kwargs)

    def forward(self, input: Value) -> Value:
        """Returns the sequential module's output.

        Args:
            input: a tensor or a tuple of tensors, with one size in the first dimension. So is what goes from
                partition to partition.

        Raises:
            PipeTypeError: (a TypeError) something else.
        """
        check(input)
        if not self.devices:  # an empty module
            return input
        values = split(input, self.chunks)
        expect_micro_batches(self, len(values))
        return join(self._run(values))

    def _run(self, values: list[Value]) -> list[Value]:
        """Returns micro-batches after the last partition, on its device; see [Note: cells in clock order]."""
        skips: list[Skips] = [{} for _ in values]
        # As fairscale's: the first partition says whether the module is in training mode.
        training = self.partitions[0].training
        stop = checkpointed_cells(self.checkpoint, len(values)) if training else 0
        for tick in ticks(len(values), len(self.partitions)):
            # Copies first: behind a cell of this tick they would wait for it.
            arrived = [self._fetch(i, j, values, skips) for i, j in tick]
            # A cell on the host keeps this thread busy: others are launched before.
            for (i, j), came in sorted(
                zip(tick, arrived, strict=True), key=lambda c: self.devices[c[0][1]].type == "cpu"
            ):
                values[i], left = run_cell(
                    self.partitions[j], values[i], came, f"chunk{i}-part{j}", checkpoint=i < stop
                )
                skips[i].update(left)
        return values

    def _fetch(self, i: int, j: int, values: list[Value], skips: list[Skips]) -> Skips:
        """Brings a micro-batch to a partition's device, and the skip tensors popped there, which are returned."""
        device = self.devices[j]
        values[i] = move(values[i], device)
        came = {key: skips[i].pop(key) for key in self._arriving[j]}
        return {key: None if t is None else move(t, device) for key, t in came.items()}  # type: ignore[misc]


# ------------------------------------------------------------ the schedule: GPipe's order
# [Note: cells in clock order] Cell (i, j) is micro-batch i in partition j. At tick k run the cells with i + j = k,
# which don't depend on each other::
#
#    tick   cells of 3 micro-batches and 3 partitions
#    0      (0,0)
#    1      (1,0) (0,1)
#    2      (2,0) (1,1) (0,2)
#    3            (2,1) (1,2)
#    4                  (2,2)
#
# One thread issues them all. Where kernels are launched and not waited for, devices work on their cells of a tick at
# the same time; on the host nothing would overlap in threads either. Autograd takes what is ready latest first, so
# backward runs the ticks in reverse, without any order of its own having to be written into the graph.
#
# [Note: skip connections] A cell is a function of a micro-batch and the skip tensors that its partition pops from
# earlier ones; it returns the micro-batch and what it has stashed and not popped. So skip tensors are arguments and
# results, move from device to device as the micro-batch does, and their gradients go the reverse way.
def ticks(m: int, n: int) -> Iterator[list[tuple[int, int]]]:
    """Yields lists of cells (micro-batch, partition) that run at the same time, of m micro-batches and n partitions."""
    for k in range(m + n - 1):
        yield [(k - j, j) for j in range(max(0, k + 1 - m), min(k + 1, n))]


def checkpointed_cells(checkpoint: str, micro_batches: int) -> int:
    """Returns how many of the micro-batches, counted from the first, keep no activations."""
    return {"always": micro_batches, "except_last": micro_batches - 1, "never": 0}[checkpoint]


def run_cell(
    layers: nn.Module, value: Value, skips: Skips, label: str, *, checkpoint: bool
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
