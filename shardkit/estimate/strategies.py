"""The ways in which a model can be sharded, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import nn

from ..backend import Backend
from ..fsdp import FSDP, fully_shard
from ..fsdp.originals import as_tensors
from ..fsdp.state import state_of
from ..layout import greedy_owners
from ..oss.optimizer import OSS
from ..policy import PrecisionPolicy, ReshardPolicy
from ..sharded_ddp.wrapper import ShardedDDP
from ..types import Kwargs

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
Units = Callable[[nn.Module, Callable[[nn.Module], nn.Module]], None]


class Sharded(NamedTuple):
    """A model that is ready to be trained."""

    model: nn.Module
    optimizer: torch.optim.Optimizer


class Recipe(NamedTuple):
    """What a strategy is given.

    Attributes:
        model: on the meta device.
        units: makes units of parts of the model.
        optimizer: the optimizer's class and arguments.
        compute: dtype of computation; None: the parameters'.
        backend: the rank's.
    """

    model: nn.Module
    units: Units
    optimizer: tuple[type[torch.optim.Optimizer], Kwargs]
    compute: torch.dtype | None
    backend: Backend

    def over(self, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        kind, options = self.optimizer
        return kind(params, **options)


def _wrapped(recipe: Recipe, after_forward: bool) -> Sharded:
    options: Kwargs = {
        "backend": recipe.backend,
        "precision": PrecisionPolicy(compute=recipe.compute),
        "reshard": ReshardPolicy(after_forward=after_forward),
    }
    recipe.units(recipe.model, lambda part: FSDP(part, **options))
    model = FSDP(recipe.model, **options)
    return Sharded(model, recipe.over(model.parameters()))


def _fsdp(recipe: Recipe) -> Sharded:
    return _wrapped(recipe, True)


def _fsdp_kept(recipe: Recipe) -> Sharded:
    return _wrapped(recipe, False)


def _in_place(recipe: Recipe) -> Sharded:
    precision = PrecisionPolicy(compute=recipe.compute)

    def unit(part: nn.Module) -> nn.Module:
        return fully_shard(part, backend=recipe.backend, precision=precision)

    recipe.units(recipe.model, unit)
    unit(recipe.model)
    return Sharded(recipe.model, recipe.over(recipe.model.parameters()))


def _sharded_ddp(recipe: Recipe) -> Sharded:
    kind, options = recipe.optimizer
    model = recipe.model if recipe.compute is None else recipe.model.to(recipe.compute)
    optimizer = OSS(model.parameters(), kind, backend=recipe.backend, **options)
    return Sharded(ShardedDDP(model, optimizer, backend=recipe.backend), optimizer)


STRATEGIES: dict[str, Callable[[Recipe], Sharded]] = {
    "fsdp": _fsdp,
    "fsdp-kept": _fsdp_kept,
    "fully_shard": _in_place,
    "sharded_ddp": _sharded_ddp,
}


def fullest_rank(strategy: str, model: nn.Module, world_size: int) -> int:
    """The rank that needs most."""
    if strategy != "sharded_ddp":
        return 0
    params = list(model.parameters())
    loads = [0] * world_size
    greedy_owners([p.numel() for p in params], [p.requires_grad for p in params], loads)
    return loads.index(max(loads))


def kinds_of(sharded: Sharded, resized: Iterable[torch.Tensor]) -> dict[str, list[torch.Tensor]]:
    """Its tensors now, but activations; ``resized`` had their memory taken or given back."""
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
