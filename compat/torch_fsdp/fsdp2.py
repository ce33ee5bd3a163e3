"""FSDP2's place, served as ``shardkit.torch_fsdp2``: torch's ``fully_shard`` is shardkit's in this process.

::

    import shardkit.torch_fsdp2
    shardkit.torch_fsdp2.install()      # before what imports torch's function: torchtitan, say

Trainers that call torch's ``fully_shard`` run unchanged then. FSDPModule and the policies stay torch's own classes.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import TypeVar

import torch
import torch.distributed.fsdp as theirs
from torch import nn

from shardkit import fsdp as ours
from shardkit.backend import backend_of_job
from shardkit.compat import install_in_children
from shardkit.errors import ConfigurationError, LifecycleError
from shardkit.fsdp import register_fsdp_forward_method
from shardkit.torch_seams.tensors import mesh_over
from shardkit.types import AnyCallable, Kwargs, Tree

M = TypeVar("M", bound="nn.Module | Sequence[nn.Module]")

__all__ = ["fully_shard", "register_fsdp_forward_method"]


@functools.wraps(theirs.fully_shard)
def fully_shard(module: M, **arguments: Tree) -> M:
    """Shards as :func:`shardkit.fully_shard` with ``dtensors=True``, whatever torch's arguments are.

    Without ``mesh`` it is over all ranks, on the job's device, as in torch: accelerate's models are on the host before.
    """
    if arguments.get("mesh") is None and torch.distributed.is_initialized():
        arguments["mesh"] = mesh_over(None, backend_of_job().device_type)
    return ours.fully_shard(module, dtensors=True, **arguments)


# ------------------------------------------------------------ torch's names, as the door for FSDP1 serves them, too
class Served:
    """Objects of torch's that others take the place of, wherever torch has them, while it is installed.

    Args:
        door: module that has ``install()``.
        version: accelerate's number of what is served.
        modules: of torch's, with those of ours whose ``__all__`` is served by the same names.
    """

    def __init__(self, door: str, version: int, modules: dict[ModuleType, ModuleType]) -> None:
        self._door, self._version = door, version
        self._theirs: Kwargs = {}
        self._ours: Kwargs = {}
        for torchs, own in modules.items():
            for name in own.__all__:
                if vars(torchs).get(name, vars(own)[name]) is not vars(own)[name]:
                    self._theirs[name], self._ours[name] = vars(torchs)[name], vars(own)[name]

    def install(self) -> None:
        """Serves ours from here on, in spawned processes too. A second call changes nothing.

        Programs started anew, such as torchrun's ranks, install it themselves (``torchrun -m shardkit run-as-fsdp2
        train.py``).

        Raises:
            LifecycleError: a module that is no part of torch has imported what is torch's already.
        """
        if self.is_installed():
            return
        name_of = {id(one): name for name, one in self._theirs.items()}
        for place, module in _loaded():
            found = [name_of[id(one)] for one in vars(module).values() if id(one) in name_of]
            if found and place.partition(".")[0] not in ("torch", "shardkit"):
                raise LifecycleError(
                    f"{place} has imported torch's {found[0]} already, and keeps it; call {self._door}.install() "
                    "before the first import of what calls it"
                )
        self._replace(self._theirs, self._ours)
        _versions.add(self._version)
        if importlib.util.find_spec("accelerate") is not None:
            from accelerate.state import AcceleratorState

            if not hasattr(AcceleratorState.__init__, "__wrapped__"):
                AcceleratorState.__init__ = _with_plugin_on_cpus(AcceleratorState.__init__)
        install_in_children(self._door)

    def uninstall(self) -> None:
        """Ends what :meth:`install` began. What has been sharded or imported meanwhile stays what it is."""
        if self.is_installed():
            self._replace(self._ours, self._theirs)
            _versions.discard(self._version)
            install_in_children(self._door, False)

    def is_installed(self) -> bool:
        """Says whether torch's names are ours."""
        return self._version in _versions

    @staticmethod
    def _replace(known: Kwargs, by: Kwargs) -> None:
        for place, module in _loaded():
            for name in known if place.partition(".")[0] == "torch" else ():
                if vars(module).get(name) is known[name]:
                    setattr(module, name, by[name])


def _loaded() -> list[tuple[str, ModuleType]]:
    return [(name, module) for name, module in list(sys.modules.items()) if isinstance(module, ModuleType)]


_versions: set[int] = set()  # of what is installed


def _with_plugin_on_cpus(begin: AnyCallable) -> AnyCallable:
    """Makes accelerate take its plug-in for FSDP where ranks are CPUs, too: it would take DDP there, in silence."""

    @functools.wraps(begin)
    def begin_with_plugin(self: Tree, *args: Tree, fsdp_plugin: Tree = None, **kwargs: Tree) -> None:
        begin(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        is_ours = fsdp_plugin is not None and fsdp_plugin.fsdp_version in _versions
        if is_ours and fsdp_plugin.fsdp_version == 1 and not fsdp_plugin.use_orig_params:
            raise ConfigurationError(
                "accelerate's plug-in for FSDP1 makes flat parameters, whose names are not torch's on the way through "
                "the modules, so that a Trainer's weight decay would find none; pass use_orig_params=True to "
                "FullyShardedDataParallelPlugin, or in fsdp_config"
            )
        if self.distributed_type == "MULTI_CPU" and is_ours:
            from accelerate.state import DistributedType, PartialState

            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin
            # from where it is read each time
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP
            if self.mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(self.mixed_precision)

    return begin_with_plugin


_served = Served("shardkit.torch_fsdp2", 2, {theirs: sys.modules[__name__]})
install, uninstall, is_installed = _served.install, _served.uninstall, _served.is_installed
