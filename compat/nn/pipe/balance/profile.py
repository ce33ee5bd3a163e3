"""fairscale.nn.pipe.balance.profile."""

from __future__ import annotations

import torch

from shardkit.pipeline.microbatch import Batch
from shardkit.redirected import redirected_names

__getattr__ = redirected_names(__name__)


Device = torch.device | int | str


def detach(batch: Batch) -> None:
    """Cuts a batch off its graph, in place."""
    batch[:] = tuple(x.detach().requires_grad_(x.requires_grad) for x in batch)
