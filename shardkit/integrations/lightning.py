"""A strategy for Lightning's Trainer.

::

    trainer = Trainer(devices=8, strategy=ShardkitStrategy())   # or "shardkit", after this module was imported
    trainer.fit(module, ...)

Checkpoints are those of one process: any world size, and code without this library, goes on with them.
"""

from __future__ import annotations

from functools import partialmethod

from lightning.fabric.utilities.optimizer import _optimizer_to_device, _optimizers_to_device
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.strategies.strategy import _ForwardRedirection
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim import Optimizer

from ..errors import ConfigurationError
from ..fsdp.state import state_of
from ..types import Framework, SavedState, StateDict, Tree
from . import fabric
from .sharding import Sharding, is_sharded, load_whole_state, whole_state


class ShardkitStrategy(DDPStrategy):
    """Shards a LightningModule when it is set up: after ``configure_model``, before ``configure_optimizers``.

    With manual optimization, where ``training_step`` calls backward and steps, each part of the module that is an
    attribute of it is sharded by itself.

    Args:
        sharding: which parts become units, and how.
        options: as of Lightning's ``DDPStrategy``: ``process_group_backend``, ``timeout``, ``start_method``, ...
    """

    model: Framework
    _layer_sync: Framework

    def __init__(self, sharding: Sharding | None = None, **options: Framework) -> None:
        super().__init__(**options)
        self._sharding = sharding or Sharding()
        self._forward_redirection = _ForwardRedirection()

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Says so, since each rank loads a unit at a time."""
        return True

    def setup(self, trainer: Framework) -> None:
        """Moves, converts and shards the module; makes optimizers where it is to be trained."""
        self.accelerator.setup(trainer)
        fits = trainer.state.fn == TrainerFn.FITTING
        if fits and self._layer_sync:
            self.model = self._layer_sync.apply(self.model)
            self._layer_sync = None  # to take it back would replace modules that are sharded
        if not is_sharded(self.model):
            self.precision_plugin.convert_module(self.model)
            self.model_to_device()
        self._shard()
        if fits:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if fits:
            _optimizers_to_device(self.optimizers, self.root_device)

    def _shard(self) -> None:
        module = self.lightning_module
        if module.automatic_optimization:
            self._sharding.shard(module)
            return
        own = [name for name, _ in module.named_parameters(recurse=False)]
        if own and not is_sharded(module):
            raise ConfigurationError(
                f"{type(module).__name__} optimizes manually and has parameters of its own ({', '.join(own)}), which "
                "no call of a module would gather. Put them into a module that is an attribute of it"
            )
        for child in module.children():
            if any(p.requires_grad for p in child.parameters()):
                self._sharding.shard(child)

    # ------------------------------------------------------------ steps
    def _step(self, context: str, name: str, *args: object, **kwargs: object) -> Tree:
        """Makes the whole step one forward of the module: all of its parameters can be used anywhere in it."""
        module = self.lightning_module
        with getattr(self.precision_plugin, context)():
            if state_of(module) is not None:
                return self._forward_redirection(module, module, name, *args, **kwargs)
            return getattr(module, name)(*args, **kwargs)

    training_step = partialmethod(_step, "train_step_context", "training_step")
    validation_step = partialmethod(_step, "val_step_context", "validation_step")
    test_step = partialmethod(_step, "test_step_context", "test_step")
    predict_step = partialmethod(_step, "predict_step_context", "predict_step")

    # ------------------------------------------------------------ checkpoints
    def lightning_module_state_dict(self) -> StateDict:
        """Returns a full one, on rank 0 (collective)."""
        found = self.lightning_module.state_dict()
        return found if self.is_global_zero else {}

    def optimizer_state(self, optimizer: Optimizer) -> StateDict:
        """Returns what one process has, on rank 0 (collective)."""
        return whole_state(_inner(optimizer), self.is_global_zero)

    def load_optimizer_state_dict(self, checkpoint: SavedState) -> None:
        """Takes what one process has saved, or these ranks, or others."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            load_whole_state(_inner(optimizer), state)
            _optimizer_to_device(_inner(optimizer), self.root_device)


def _inner(optimizer: Framework) -> Optimizer:
    return optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer


StrategyRegistry.register("shardkit", ShardkitStrategy, description="shardkit: parameters sharded over ranks")
FabricStrategy = fabric.ShardkitStrategy
"""For Fabric, so that one import registers both."""
