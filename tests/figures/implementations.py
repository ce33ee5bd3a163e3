"""The ways to train data-parallel that are counted and timed against each other."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

ADAMW = {"lr": 1e-3, "fused": True}


class Trainer(NamedTuple):
    """A model ready to train.

    Attributes:
        model: takes a batch.
        optimizer: steps.
        zero_grad: clears gradients the way the library's users do.
    """

    model: nn.Module
    optimizer: Any
    zero_grad: Callable[[], None]


def _sharded(library: str, model: nn.Module, **wrapper: Any) -> Trainer:
    """OSS and ShardedDataParallel; where buckets hold the gradients, fairscale's wrapper has to clear them itself."""
    oss = importlib.import_module(f"{library}.optim.oss").OSS
    sharded = importlib.import_module(f"{library}.nn.data_parallel").ShardedDataParallel
    optimizer = oss(model.parameters(), optim=torch.optim.AdamW, **ADAMW)
    wrapped = sharded(model, optimizer, **wrapper)
    clear = wrapped.zero_grad if library == "fairscale" else optimizer.zero_grad
    return Trainer(wrapped, optimizer, lambda: clear(set_to_none=True))


def bare(model: nn.Module) -> Trainer:
    """One process, no wrapper."""
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    return Trainer(model, optimizer, optimizer.zero_grad)


def ddp(model: nn.Module, bucket_view: bool = False) -> Trainer:
    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=bucket_view)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    return Trainer(wrapped, optimizer, optimizer.zero_grad)


def ddp_zero(model: nn.Module) -> Trainer:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True, **ADAMW
    )
    return Trainer(wrapped, optimizer, optimizer.zero_grad)


def balanced(model: nn.Module) -> Trainer:
    """shardkit's own API with owners balanced by size."""
    kit = importlib.import_module("shardkit")
    optimizer = kit.OSS(model.parameters(), optim=torch.optim.AdamW, partition="balanced", **ADAMW)
    wrapped = kit.ShardedDDP(model, optimizer)
    return Trainer(wrapped, optimizer, optimizer.zero_grad)


IMPLEMENTATIONS: dict[str, Callable[[nn.Module], Trainer]] = {
    "bare": bare,
    "ddp": ddp,
    "ddp_view": lambda m: ddp(m, bucket_view=True),
    "ddp_zero": ddp_zero,
    "shardkit": lambda m: _sharded("shardkit", m),
    "balanced": balanced,
    "fairscale": lambda m: _sharded("fairscale", m),
    "fairscale_unbuffered": lambda m: _sharded("fairscale", m, reduce_buffer_size=0),
}
