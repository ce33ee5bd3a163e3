"""A sequential module whose parts are on several devices and work on micro-batches at the same time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from ..wrapping.activations import patch_batchnorm
from .microbatch import DeferredBatchNorm, Value, check, expect_micro_batches, join, split
from .partition import (
    PipeTypeError,
    check_balance,
    check_checkpoint,
    require_balance,
    split_module,
    verify_module,
    verify_shared_parameters,
)
from .schedule import Pipeline
from .skip import verify_skippables

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
        require_balance(balance)
        check_checkpoint(self.checkpoint, self.chunks)
        verify_module(module)
        verify_skippables(module)
        self.balance = list(balance or [])
        self.devices = _all_devices() if devices is None else [torch.device(d) for d in devices]
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
        self.pipeline = Pipeline(partitions, self.devices, self.checkpoint)

    def __len__(self) -> int:
        """Returns the number of layers of the sequential module."""
        return sum(self.balance)

    def __getitem__(self, index: int) -> nn.Module:
        """Returns a layer of the sequential module."""
        return list(self)[index]

    def __iter__(self) -> Iterator[nn.Module]:
        """Returns the layers of the sequential module."""
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
        return join(self.pipeline.run(values))


def _all_devices() -> list[torch.device]:
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None:
        return []
    return [torch.device(kind.type, i) for i in range(torch.accelerator.device_count())]
