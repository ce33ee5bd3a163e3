"""The doors through which FSDP shards a module, and a small model to send through them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from shardkit import FSDP, fully_shard
from shardkit.torch_fsdp import FullyShardedDataParallel as TorchFSDP

DOORS: dict[str, Callable[..., Any]] = {
    "FSDP": FSDP,
    "unflattened": partial(FSDP, flatten=False),
    "fully_shard": fully_shard,
    "dtensors": partial(fully_shard, dtensors=True),
    "torch_fsdp": partial(TorchFSDP, use_orig_params=False),
    "torch_fsdp_orig": partial(TorchFSDP, use_orig_params=True),
}


def through(door: str, model: Any, *units: str, **options: Any) -> Any:
    """Shards a model; these of its parts are units of their own."""
    shard = partial(DOORS[door], **options)
    for name in units:
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, shard(model.get_submodule(name)))
    return shard(model)


def linears(*widths: int, seed: int = 0) -> nn.Sequential:
    """Linear layers with tanh between them, the same at every call."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(widths):
        layers += [nn.Linear(a, b), nn.Tanh()]
    return nn.Sequential(*layers[:-1])
