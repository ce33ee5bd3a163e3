"""A strategy for Lightning's Fabric.

::

    fabric = Fabric(devices=8, strategy=ShardkitStrategy())     # or "shardkit", after this module was imported
    model, optimizer = fabric.setup(model, optimizer)

Checkpoints are those of one process: any world size, and code without this library, goes on with them.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace

from lightning.fabric.strategies import STRATEGY_REGISTRY, DDPStrategy
from lightning.fabric.strategies.strategy import _BackwardSyncControl
from torch import nn
from torch.optim import Optimizer

from ..fsdp import sharding_of
from ..fsdp.state import state_of
from ..types import Framework, SavedState, StateDict, Tree
from .sharding import Sharding, follow, load_whole_state, whole_state


class ShardkitStrategy(DDPStrategy):
    """Shards what ``fabric.setup`` gets; an optimizer that was made before follows.

    Args:
        sharding: which parts become units, and how.
        options: as of Fabric's ``DDPStrategy``: ``process_group_backend``, ``timeout``, ``start_method``, ...
    """

    def __init__(self, sharding: Sharding | None = None, **options: Framework) -> None:
        super().__init__(**options)
        self._sharding = sharding or Sharding()
        self._backward_sync_control = _NoSync()

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Returns the module, sharded, behind one that is called in its place."""
        self._sharding.shard(module)
        return _Called(module)

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Returns the optimizer, over shards."""
        follow(optimizer)
        return optimizer

    # ------------------------------------------------------------ checkpoints
    def get_module_state_dict(self, module: nn.Module) -> StateDict:
        """Returns a full one (collective)."""
        return _inner(module).state_dict()

    def load_module_state_dict(self, module: nn.Module, state_dict: SavedState, strict: bool = True) -> None:
        """Takes a full one (collective)."""
        _inner(module).load_state_dict(state_dict, strict=strict)

    def get_optimizer_state(self, optimizer: Optimizer) -> StateDict:
        """Returns what one process has, on rank 0 (collective)."""
        return whole_state(optimizer, self.is_global_zero)

    def load_checkpoint(
        self, path: str | Path, state: Tree = None, *args: object, **kwargs: object
    ) -> StateDict:
        """Loads as any strategy does; optimizers take the state of one process."""
        if isinstance(state, Optimizer):
            load_whole_state(state, super().load_checkpoint(path))
            return {}
        if not isinstance(state, dict):
            return super().load_checkpoint(path, state, *args, **kwargs)
        optimizers = {k: partial(load_whole_state, v) for k, v in state.items() if isinstance(v, Optimizer)}
        takes = {k: SimpleNamespace(state_dict=dict, load_state_dict=load) for k, load in optimizers.items()}
        filled = {**state, **takes}
        rest = super().load_checkpoint(path, filled, *args, **kwargs)
        state.update({k: v for k, v in filled.items() if k not in takes})
        return rest


class _Called(nn.Module):
    """Stands before a module, so that Fabric leads its other methods through forward."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: object, **kwargs: object) -> Tree:
        return self.module(*args, **kwargs)


def _inner(module: nn.Module) -> nn.Module:
    return module.module if isinstance(module, _Called) else module


class _NoSync(_BackwardSyncControl):
    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        inner = _inner(module)
        return sharding_of(inner).no_sync() if enabled and state_of(inner) is not None else nullcontext()


STRATEGY_REGISTRY.register(
    "shardkit", ShardkitStrategy, description="shardkit: parameters sharded over ranks"
)
