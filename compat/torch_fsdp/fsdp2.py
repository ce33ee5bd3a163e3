"""FSDP2's place, served as ``shardkit.torch_fsdp2``: torch's ``fully_shard`` is shardkit's in this process.

::

    import shardkit.torch_fsdp2
    shardkit.torch_fsdp2.install()      # before what imports torch's function: torchtitan, say

Trainers that call torch's ``fully_shard`` run unchanged then. FSDPModule and the policies stay torch's own classes.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import TypeVar

import torch
import torch.distributed.fsdp as theirs
from torch import nn

from shardkit import fsdp as ours
from shardkit.backend import backend_of_job
from shardkit.errors import ConfigurationError
from shardkit.fsdp import register_fsdp_forward_method
from shardkit.fsdp.state import state_of
from shardkit.torch_seams.tensors import mesh_over
from shardkit.types import Tree

from .served import Served

M = TypeVar("M", bound="nn.Module | Sequence[nn.Module]")

__all__ = ["fully_shard", "register_fsdp_forward_method", "share_comm_ctx"]


@functools.wraps(theirs.fully_shard)
def fully_shard(module: M, **arguments: Tree) -> M:
    """Shards as :func:`shardkit.fully_shard` with ``dtensors=True``, whatever torch's arguments are.

    Without ``mesh`` it is over all ranks, on the job's device, as in torch: accelerate's models are on the host before.
    """
    if arguments.get("mesh") is None and torch.distributed.is_initialized():
        arguments["mesh"] = mesh_over(None, backend_of_job().device_type)
    return ours.fully_shard(module, dtensors=True, **arguments)


fully_shard.state = lambda module: state_of(module) and module._get_fsdp_state()  # type: ignore[attr-defined]


def share_comm_ctx(modules: Sequence[nn.Module]) -> None:
    """Shares streams, which channels of a backend are here, and shared already.

    Raises:
        ConfigurationError: a module is not sharded.
    """
    for module in modules:
        if state_of(module) is None:
            raise ConfigurationError(
                f"share_comm_ctx: this {type(module).__name__} is not sharded by fully_shard"
            )


_served = Served("shardkit.torch_fsdp2", 2, {theirs: sys.modules[__name__]})
install, uninstall, is_installed = _served.install, _served.uninstall, _served.is_installed
