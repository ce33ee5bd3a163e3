"""Parts of fairscale.nn.pipe beside Pipe and AsyncPipe."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch
from torch import nn

from shardkit.pipeline import microbatch, partition
from shardkit.pipeline.async_pipe import LazyModule
from shardkit.pipeline.balance import balance_cost as _balance_cost
from shardkit.pipeline.balance import profile_sizes, profile_times
from shardkit.pipeline.microbatch import Batch
from shardkit.pipeline.microbatch import Value as TensorOrTensors
from shardkit.pipeline.pipe import Device
from shardkit.wrapping.activations import call_checkpointed

# ------------------------------------------------------------ types
Tensors = tuple[torch.Tensor, ...]
InputDevice = int | str | torch.device | None


# ------------------------------------------------------------ micro-batches
BatchFunction = Callable[[TensorOrTensors], TensorOrTensors]


def scatter(input: TensorOrTensors, chunks: int) -> list[Batch]:
    return [Batch(value, i) for i, value in enumerate(microbatch.split(input, chunks))]


def gather(outputs: list[Batch]) -> TensorOrTensors:
    return microbatch.join([batch.value for batch in outputs])


# ------------------------------------------------------------ checkpointing
class Function(Protocol):
    def __call__(self, input: TensorOrTensors) -> TensorOrTensors: ...


class Checkpointing:
    """A function and its input: :meth:`checkpoint` computes without keeping activations."""

    def __init__(self, function: Function, batch: Batch) -> None:
        self.function = function
        self.batch = batch

    def checkpoint(self) -> Batch:
        """The function's result, whose activations backward computes again."""
        # What parameters the function uses is not known: those of a module are, others as if there were some.
        near = self.function if isinstance(self.function, nn.Module) else _UNKNOWN
        value = call_checkpointed(self.function, (self.batch.value,), {}, near=near)
        return Batch(value, self.batch.index)

    def recompute(self, batch: Batch) -> None:
        """Nothing: backward comes to it by itself."""


_UNKNOWN = nn.ParameterList([nn.Parameter(torch.empty(0))])


# ------------------------------------------------------------ Pipe
Devices = Iterable[Device] | list[Device]
Module = nn.Module


def recommend_auto_balance(message: str) -> str:
    """The message, and how to have the numbers of layers found."""
    return message + partition.ADVICE


def split_module(
    module: nn.Sequential, balance: Iterable[int], devices: list[torch.device]
) -> tuple[nn.ModuleList, list[int], list[torch.device]]:
    """Partitions, moved to their devices, with the numbers of layers and the devices (superfluous ones are removed).

    Raises:
        BalanceError: (a ValueError) the numbers don't fit.
        TooFewDevicesError: (an IndexError) fewer devices than partitions.
    """
    balance = list(balance)
    partition.check_balance(len(module), balance, len(devices), "devices")
    del devices[len(balance) :]
    parts = partition.split_module(module, balance)
    return nn.ModuleList(p.to(d) for p, d in zip(parts, devices, strict=True)), balance, devices


def verify_splitting(
    module: nn.Sequential,
    partitions: Sequence[nn.Sequential],
    balance: Iterable[int],
    devices: list[torch.device],
) -> None:
    """Raises ConfigurationError (a ValueError) for a parameter on two devices."""
    partition.verify_shared_parameters(partitions, devices)


# ------------------------------------------------------------ AsyncPipe
def check_balance(module: nn.Sequential | list[LazyModule], balance: list[int]) -> None:
    """Raises BalanceError (a ValueError) for numbers of layers that don't fit."""
    partition.check_balance(len(module), balance, len(balance), "ranks")


def verify_module(module: nn.Sequential | list[LazyModule]) -> None:
    """Raises ConfigurationError (a ValueError) for a layer that is there twice."""
    partition.verify_distinct(module)


# ------------------------------------------------------------ balance
def detach(batch: Batch) -> None:
    """Cuts a batch off its graph, in place."""
    batch[:] = tuple(x.detach().requires_grad_(x.requires_grad) for x in batch)


def balance_by_time(
    partitions: int,
    module: nn.Sequential,
    sample: TensorOrTensors,
    *,
    timeout: float = 1.0,
    device: Device = torch.device("cuda"),  # noqa: B008  # fairscale's default
) -> list[int]:
    """Numbers of layers such that forward and backward of all partitions take about the same time.

    Args:
        partitions: how many.
        module: stays as it is; copies of its layers run one by one.
        sample: input with any batch size.
        timeout: seconds to measure for.
        device: where the layers run; of any kind.
    """
    return _balance_cost(profile_times(module, sample, timeout, torch.device(device)), partitions)


def balance_by_size(
    partitions: int,
    module: nn.Sequential,
    input: TensorOrTensors,
    *,
    chunks: int = 1,
    param_scale: float = 2.0,
    device: Device = torch.device("cuda"),  # noqa: B008  # fairscale's default
) -> list[int]:
    """Numbers of layers such that all partitions take about the same memory in training.

    Args:
        partitions: how many.
        module: stays as it is; copies of its layers run one by one.
        input: a mini-batch.
        chunks: micro-batches it will be cut into.
        param_scale: copies of parameters: 2 for themselves and gradients, and the optimizer's state (SGD with
            momentum 1, Adam 2).
        device: where the layers run; of any kind (fairscale: CUDA only).
    """
    return _balance_cost(profile_sizes(module, input, chunks, param_scale, torch.device(device)), partitions)
