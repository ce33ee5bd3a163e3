"""fairscale.nn.pipe.balance.profile."""

from __future__ import annotations

import torch

from shardkit.compat.redirected import redirected_names
from shardkit.pipeline.microbatch import Batch

__getattr__ = redirected_names(__name__)


Device = torch.device | int | str


def detach(batch: Batch) -> None:
    """Cuts a batch off its graph, in place."""
    batch[:] = tuple(x.detach().requires_grad_(x.requires_grad) for x in batch)
