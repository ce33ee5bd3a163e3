"""accelerate's ``Accelerator`` and transformers' ``Trainer`` on sharded models, as they are.

::

    plugin = ShardkitPlugin()
    accelerator = plugin.attach(Accelerator())
    trainer = plugin.attach(Trainer(model=model, args=arguments, ...))

Both are used as always. Checkpoints are those of one process: any world size, and code without this library, goes on
with them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from unittest import mock

from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from torch.optim import Optimizer

from ..errors import ConfigurationError
from ..types import AnyCallable, Framework, T, Tree
from .sharding import Sharding, follow, is_sharded, load_whole_state, whole_state


@dataclass(frozen=True)
class ShardkitPlugin(Sharding):
    """One object for accelerate and transformers: shards what they prepare, and saves and loads it whole.

    Attributes: as of :class:`~shardkit.integrations.sharding.Sharding`: which parts become units, and how.
    """

    def attach(self, to: T) -> T:
        """Lets an ``Accelerator``, or a ``Trainer`` of any class, work with sharded models.

        ``accelerator.prepare`` shards modules that are not sharded yet, and an optimizer over their parameters that is
        prepared with them, or afterwards, follows. The model of a ``Trainer`` is sharded here.

        Returns: the object.

        Raises:
            ConfigurationError: it is neither; accelerate is set up for its own FSDP, DeepSpeed or Megatron.
        """
        if isinstance(to, Accelerator):
            _Attached(self, to)
        elif isinstance(getattr(to, "accelerator", None), Accelerator):
            _of_trainer(self, to)
        else:
            raise ConfigurationError(
                f"attach() takes an accelerate.Accelerator or a transformers.Trainer, not a {type(to).__name__}"
            )
        return to


class _Attached:
    """Replaced methods of an accelerator."""

    def __init__(self, plugin: ShardkitPlugin, accelerator: Accelerator) -> None:
        self._plugin, self._accelerator = plugin, accelerator
        kind = str(accelerator.distributed_type.value)
        if kind != "NO" and not kind.startswith("MULTI_"):
            raise ConfigurationError(
                f"accelerate is set up for {kind} (by `accelerate config`, the environment or a plug-in), which shards "
                "too. Launch without it: accelerate launch --multi_gpu, or --cpu --num_processes N"
            )
        if isinstance(accelerator.__dict__.get("prepare"), partial):
            return  # attached before
        for name in ("prepare", "prepare_model", "prepare_optimizer"):
            accelerator.__dict__[name] = partial(getattr(self, name), getattr(accelerator, name))

    def prepare(self, original: AnyCallable, *args: object, **kwargs: object) -> Tree:
        """Shards models first: optimizers follow them, in whatever order they come."""
        for obj in args:
            if isinstance(obj, nn.Module):
                self._shard(obj)
        return original(*args, **kwargs)

    def prepare_model(
        self,
        original: AnyCallable,
        model: nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
    ) -> nn.Module:
        """Gives sharded models accelerate's autocast, and no wrapper of its own."""
        if not evaluation_mode:
            self._shard(model)
        if is_sharded(model):
            return original(model, device_placement=False, evaluation_mode=True)
        return original(model, device_placement=device_placement, evaluation_mode=evaluation_mode)

    def _shard(self, model: nn.Module) -> None:
        if not any(p.requires_grad for p in model.parameters()):
            return
        stays = is_sharded(model) or hasattr(model, "hf_device_map")
        if self._accelerator.device_placement and not stays:
            model.to(self._accelerator.device)
        self._plugin.shard(model)

    def prepare_optimizer(
        self, original: AnyCallable, optimizer: Optimizer, *args: object, **kwargs: object
    ) -> Tree:
        """Makes its state that of one process to whoever saves or loads it; both are collective."""
        if isinstance(optimizer, AcceleratedOptimizer):
            return original(optimizer, *args, **kwargs)
        follow(optimizer)
        prepared = original(optimizer, *args, **kwargs)
        is_main = self._accelerator.is_main_process
        prepared.state_dict = partial(whole_state, optimizer, is_main)
        prepared.load_state_dict = partial(load_whole_state, optimizer)
        return prepared


def _of_trainer(plugin: ShardkitPlugin, trainer: Framework) -> None:
    attached = _Attached(plugin, trainer.accelerator)
    if trainer.model is not None:
        attached._shard(trainer.model)
    if trainer.optimizer is not None:
        follow(trainer.optimizer)
    if not isinstance(trainer.__dict__.get("_save"), partial):
        for name, method in (("_save", _save), ("_save_optimizer_and_scheduler", _save_optimizer)):
            trainer.__dict__[name] = partial(method, trainer, getattr(trainer, name))


def _save(
    trainer: Framework, original: AnyCallable, output_dir: str | None = None, state_dict: Tree = None
) -> None:
    """Saves on all ranks, which come here; the file is rank 0's."""
    if state_dict is None:
        state_dict = trainer.model.state_dict()
    original(output_dir, state_dict=state_dict)


def _save_optimizer(trainer: Framework, original: AnyCallable, output_dir: str) -> None:
    """Gives whoever asks for the optimizer's state meanwhile, on one rank alone too, what all ranks have gathered."""
    state = trainer.optimizer.state_dict()
    with mock.patch.object(trainer.optimizer, "state_dict", return_value=state):
        original(output_dir)
