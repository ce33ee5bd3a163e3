"""The ways in which a model can be sharded, by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from ...backend import Backend
from ...fsdp import FSDP, fully_shard
from ...fsdp.originals import as_tensors
from ...fsdp.state import state_of
from ...layout import greedy_owners
from ...oss.optimizer import OSS
from ...oss.sharded_ddp import ShardedDDP
from ...policy import PrecisionPolicy, ReducePolicy, ReshardPolicy
from ...types import Kwargs

Units = Callable[[nn.Module, Callable[[nn.Module], nn.Module]], None]


@dataclass(frozen=True)
class Subject:
    """A training.

    Attributes:
        name: what it is called in reports.
        model: makes the model; called on the meta device.
        loss: ``loss(model, batch_size)``: a scalar of a batch of so many samples.
        optimizer: class and arguments.
        units: makes units of parts of the model, before the whole is made one.
        compute: dtype of computation; None: the parameters'.
        reduce: dtype in which gradients travel; None: their own.
        tokens: of a sample; 0: samples are counted.
    """

    name: str
    model: Callable[[], nn.Module]
    loss: Callable[[nn.Module, int], torch.Tensor]
    optimizer: tuple[type[torch.optim.Optimizer], Kwargs]
    units: Units
    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None
    tokens: int = 0

    def over(self, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer of these."""
        kind, options = self.optimizer
        return kind(params, **options)


class Sharded(NamedTuple):
    """A model that is ready to be trained."""

    model: nn.Module
    optimizer: torch.optim.Optimizer


def _in_units(
    subject: Subject,
    model: nn.Module,
    backend: Backend,
    shard: Callable[..., nn.Module],
    after_forward: bool = True,
) -> Sharded:
    options: Kwargs = {
        "backend": backend,
        "precision": PrecisionPolicy(compute=subject.compute),
        "reduce": ReducePolicy(dtype=subject.reduce),
        "reshard": ReshardPolicy(after_forward=after_forward),
    }
    subject.units(model, lambda part: shard(part, **options))
    model = shard(model, **options)
    return Sharded(model, subject.over(model.parameters()))


def _sharded_ddp(subject: Subject, model: nn.Module, backend: Backend) -> Sharded:
    kind, options = subject.optimizer
    model = model if subject.compute is None else model.to(subject.compute)
    optimizer = OSS(model.parameters(), kind, backend=backend, **options)
    policy = ReducePolicy(dtype=subject.reduce)
    return Sharded(ShardedDDP(model, optimizer, reduce=policy, backend=backend), optimizer)


STRATEGIES: dict[str, Callable[..., Sharded]] = {
    "fsdp": partial(_in_units, shard=FSDP),
    "fsdp-kept": partial(_in_units, shard=FSDP, after_forward=False),
    "fully_shard": partial(_in_units, shard=fully_shard),
    "sharded_ddp": _sharded_ddp,
}


def fullest_rank(strategy: str, model: nn.Module, world_size: int) -> int:
    if strategy != "sharded_ddp":
        return 0
    params = list(model.parameters())
    loads = [0] * world_size
    greedy_owners([p.numel() for p in params], [p.requires_grad for p in params], loads)
    return loads.index(max(loads))


def fsdp2_padding(model: nn.Module, world_size: int) -> dict[str, float]:
    """Tells by label of a unit how much more of it travels where FSDP2 pads the first dimension of each parameter."""
    found = {}
    state = state_of(model)
    for flat in state.all_flats() if state is not None else ():
        rows = [(o.shape[0] if o.shape else 1, o.shape.numel()) for o in flat.originals]
        padded = sum(math.ceil(n / world_size) * world_size * (numel // max(1, n)) for n, numel in rows)
        found[flat.label] = padded / flat.layout.padded_numel
    return found


def kinds_of(sharded: Sharded, resized: Iterable[torch.Tensor]) -> dict[str, list[torch.Tensor]]:
    """Lists its tensors now, but activations; ``resized`` had their memory taken or given back."""
    model, optimizer = sharded
    params: list[torch.Tensor] = [*model.parameters(), *model.buffers()]
    gradients = [p.grad for p in params if p.grad is not None]
    gathered: list[torch.Tensor] = []
    state = state_of(model)
    for flat in state.all_flats() if state is not None else ():
        gathered.append(flat.gathered)
        with as_tensors():
            gradients += [o.param.grad for o in flat.originals if o.param.grad is not None]
    inner = optimizer.optim if isinstance(optimizer, OSS) else optimizer
    moments = [v for entry in inner.state.values() for v in entry.values() if isinstance(v, torch.Tensor)]
    return {
        "parameters": params, "gathered": gathered, "gradients": [*gradients, *resized], "optimizer state": moments
    }  # fmt: skip
