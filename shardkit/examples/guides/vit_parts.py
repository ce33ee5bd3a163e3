"""Model, schedule and checkpoints of :mod:`shardkit.examples.guides.run_vit_training`."""

from __future__ import annotations

import math
from argparse import Namespace
from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_map_only

import shardkit
from shardkit.backend import Group
from shardkit.checks.facts import all_gather_facts
from shardkit.checks.runs import check_one_save
from shardkit.errors import ConfigurationError, ShardkitError
from shardkit.examples.vit import Config, VisionTransformer
from shardkit.xla.fsdp import XlaFullyShardedDataParallel, checkpoint_module

from ...types import Kwargs, StateDict, Tree


def config_of(options: Namespace) -> Config:
    """Sizes of the model."""
    named = {name: getattr(options, name) for name in Config._fields if name != "classes"}
    return Config(**named, classes=options.num_classes)


def build(options: Namespace, device: torch.device) -> nn.Module:
    """The model: each block is made, told to compute its activations again, and sharded before the next one is made."""

    def unit(module: nn.Module, **arguments: Tree) -> nn.Module:
        if options.grad_ckpt:
            module = checkpoint_module(module)
        if options.run_without_fsdp:
            return module
        return sharded(module, **arguments)

    def sharded(module: nn.Module, **arguments: Tree) -> nn.Module:
        # FSDP itself brings shards to the device
        return XlaFullyShardedDataParallel(module if options.shard_on_cpu else module.to(device), **arguments)

    arguments: Kwargs = {
        "reshard_after_forward": options.reshard_after_forward,
        "flatten_parameters": options.flatten_parameters,
    }
    with shardkit.enable_wrap(wrapper_cls=unit, **arguments):
        model = VisionTransformer(config_of(options))
    return model.to(device) if options.run_without_fsdp else sharded(model, **arguments)


def warmup_and_cosine(warmup: int, steps: int, step: int) -> float:
    """The factor of a step: grows from 0 to 1, then falls to 0 as a cosine does.

    Args:
        warmup: steps in which it grows.
        steps: in all.
        step: so many were done.
    """
    if step < warmup:
        return step / warmup
    where = (step - warmup) / max(1, steps - warmup)
    return 0.5 * (1 + math.cos(math.pi * min(1.0, where)))


# ------------------------------------------------------------ checkpoints
def path_of(folder: str, epoch: int, rank: int) -> Path:
    """Where a rank's checkpoint is; without FSDP all have rank 0's."""
    return Path(folder) / f"epoch_{epoch}_rank_{rank}.ckpt"


def save(path: Path, model: nn.Module, optimizer: Optimizer, schedule: LRScheduler, rank: int) -> None:
    """FSDP: each rank what it has. Else rank 0 the whole (on all ranks: reading tensors runs what is recorded)."""
    checkpoint: StateDict = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "lr_scheduler": schedule.state_dict(),
    }
    if isinstance(model, XlaFullyShardedDataParallel):
        checkpoint["shard_metadata"] = model.get_shard_metadata()
    on_host = tree_map_only(torch.Tensor, lambda t: t.detach().cpu(), checkpoint)
    if "shard_metadata" in checkpoint or rank == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        shardkit.save(on_host, path)


def load(path: Path, model: nn.Module, optimizer: Optimizer, schedule: LRScheduler, group: Group) -> None:
    """Goes on from a checkpoint (collective).

    Raises:
        ConfigurationError: on all ranks, if one of them doesn't find its file, or finds one of another kind of run; if
            files are of different saves.
    """
    saved: StateDict = {}
    try:
        saved = shardkit.load(path)
        problem = _misfit(saved, model, group)
    except (ShardkitError, OSError) as error:
        problem = f"{type(error).__name__}: {error}"
    metadata = {} if problem else saved.get("shard_metadata", {})
    stamp = {k: metadata[k] for k in ("run_id", "backwards") if k in metadata}
    everybody = all_gather_facts(group, (str(path), problem, stamp), label="checkpoint to go on from")
    for rank, (_, found, _) in enumerate(everybody):
        if found:
            raise ConfigurationError(f"rank {rank} can't go on from its checkpoint {path.parent}: {found}")
    check_one_save([name for name, _, _ in everybody], [facts for _, _, facts in everybody])
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    schedule.load_state_dict(saved["lr_scheduler"])


def _misfit(saved: StateDict, model: nn.Module, group: Group) -> str:
    """What is wrong with it, or nothing."""
    metadata = saved.get("shard_metadata")
    is_sharded = isinstance(model, XlaFullyShardedDataParallel)
    if (metadata is not None) != is_sharded:
        return f"it was saved {'with' if metadata else 'without'} FSDP; choose --run_without_fsdp as then"
    if metadata is None or (metadata["rank"], metadata["world_size"]) == (group.rank, group.world_size):
        return ""
    return (
        f"it is of rank {metadata['rank']} of {metadata['world_size']}, this is rank {group.rank} of "
        f"{group.world_size}; shards are for as many ranks as have saved them "
        "(shardkit.xla.fsdp.consolidate_sharded_ckpts puts them together)"
    )
