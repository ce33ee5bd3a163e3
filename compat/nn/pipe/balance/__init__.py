"""fairscale.nn.pipe.balance: numbers of layers for Pipe, from what each layer takes."""

from __future__ import annotations

from importlib import import_module

import torch
from torch import nn

from shardkit.pipeline.balance import balance_cost as _balance_cost
from shardkit.pipeline.balance import profile_sizes, profile_times
from shardkit.types import Args

from ..types import TensorOrTensors, Tensors

__all__ = ["balance_by_size", "balance_by_time"]

blockpartition = import_module(f"{__name__}.blockpartition")

Device = torch.device | int | str


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
