"""fairscale.nn.pipe.balance.profile."""

from __future__ import annotations

import torch

from shardkit.pipeline.balance import layerwise_sandbox, profile_sizes, profile_times

from ..microbatch import Batch
from ..types import TensorOrTensors, Tensors

__all__ = [
    "Batch",
    "Device",
    "TensorOrTensors",
    "Tensors",
    "detach",
    "layerwise_sandbox",
    "profile_sizes",
    "profile_times",
]

Device = torch.device | int | str


def detach(batch: Batch) -> None:
    """Cuts a batch off its graph, in place."""
    batch[:] = tuple(x.detach().requires_grad_(x.requires_grad) for x in batch)
