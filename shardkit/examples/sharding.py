"""The strategies ``fsdp`` and ``xla_fsdp``: what is a unit, checkpoints of shards, and putting them together."""

from __future__ import annotations

import functools
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import nn

import shardkit
from shardkit.activations.checkpointing import checkpoint_wrapper
from shardkit.fsdp.local_checkpoint import consolidate
from shardkit.wrapping.policies import size_based_auto_wrap_policy, transformer_auto_wrap_policy
from shardkit.xla.fsdp import (
    XlaFullyShardedDataParallel,
    checkpoint_module,
    consolidate_sharded_model_checkpoints,
)

from ..types import Kwargs, StateDict, Tree
from .flags import DTYPES

WHOLE = "_consolidated.pth"
Units = Sequence[type[nn.Module]]


class Interface(NamedTuple):
    """One of the two: class of wrappers, their arguments, and what makes a module compute activations again."""

    wrapper: type[nn.Module]
    arguments: Kwargs
    checkpointed: Callable[[nn.Module], nn.Module]


def interface(options: Namespace) -> Interface:
    """The one that ``--strategy`` names."""
    dtype = None if options.compute_dtype == "float32" else DTYPES[options.compute_dtype]
    reshard = not options.no_reshard_after_forward
    if options.strategy == "xla_fsdp":
        arguments: Kwargs = {
            "reshard_after_forward": reshard,
            "flatten_parameters": options.flatten_parameters,
            "compute_dtype": dtype,
        }
        return Interface(XlaFullyShardedDataParallel, arguments, checkpoint_module)
    arguments = {
        "reshard": shardkit.ReshardPolicy(after_forward=reshard),
        "flatten": options.flatten_parameters,
        "precision": shardkit.PrecisionPolicy(compute=dtype),
    }
    return Interface(shardkit.FSDP, arguments, checkpoint_wrapper)


def fully_sharded(
    build: Callable[[], nn.Module], units: Units, options: Namespace, device: torch.device
) -> nn.Module:
    """The network with the units that the options ask for, in an outermost unit.

    Args:
        build: makes the network; it calls ``shardkit.wrap`` on the parts that ``--use_nested_fsdp`` is about.
        units: types of the parts that ``--auto_wrap_policy type_based`` and ``--use_gradient_checkpointing`` are about.
        options: the command line.
        device: where it computes.
    """
    wrapper, arguments, checkpointed = interface(options)

    def unit(module: nn.Module, **arguments: Tree) -> nn.Module:
        if options.use_gradient_checkpointing:
            module = checkpointed(module)
        return wrapper(module.to(device), **arguments)

    if options.use_nested_fsdp:  # part by part: no rank ever holds the whole model
        with shardkit.enable_wrap(wrapper_cls=unit, **arguments):
            return wrapper(build().to(device), **arguments)
    network = build()
    if options.use_gradient_checkpointing:
        checkpoint_units(network, units, checkpointed)
    policies = {
        "size_based": functools.partial(
            size_based_auto_wrap_policy, min_num_params=options.auto_wrap_min_num_params
        ),
        "type_based": functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=set(units)),
    }
    network.to(device)
    if options.auto_wrap_policy in policies:
        policy = policies[options.auto_wrap_policy]
        with shardkit.enable_wrap(wrapper_cls=wrapper, auto_wrap_policy=policy, **arguments):
            network = shardkit.auto_wrap(network)
    return network if isinstance(network, wrapper) else wrapper(network, **arguments)


def checkpoint_units(
    network: nn.Module, units: Units, checkpointed: Callable[[nn.Module], nn.Module] = checkpoint_wrapper
) -> None:
    """Lets the network's units compute their activations again in backward."""
    for module in list(network.modules()):
        if isinstance(module, tuple(units)):
            checkpointed(module)


# ------------------------------------------------------------ checkpoints
def shards_of(model: nn.Module) -> StateDict | None:
    """What a rank saves of such a model, with what is needed to put it together; None for other models."""
    if isinstance(model, XlaFullyShardedDataParallel):
        return {"model": model.state_dict(), "shard_metadata": model.get_shard_metadata()}
    if isinstance(model, shardkit.FSDP):
        return {"model": model.local_state_dict(), "shard_metadata": model.local_metadata_dict()}
    return None


def path_of(prefix: str, rank: int, ranks: int) -> str:
    """Where a rank's checkpoint is."""
    return f"{prefix}_rank-{rank}-of-{ranks}.pth"


def put_together(prefix: str, ranks: int, strategy: str = "fsdp") -> None:
    """Writes the whole model beside the shards that the ranks have saved."""
    if strategy == "xla_fsdp":
        consolidate_sharded_model_checkpoints(prefix, f"_rank-*-of-{ranks}.pth")
        return
    saved = [shardkit.load(path_of(prefix, rank, ranks)) for rank in range(ranks)]
    full = consolidate([s["model"] for s in saved], [s["shard_metadata"] for s in saved])
    shardkit.save({"model": full}, prefix + WHOLE)
