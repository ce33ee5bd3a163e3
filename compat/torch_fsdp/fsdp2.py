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
from shardkit.fsdp.state import state_of
from shardkit.torch_seams.dtensors import mesh_over
from shardkit.types import AnyCallable, Kwargs, Tree

M = TypeVar("M", bound="nn.Module | Sequence[nn.Module]")

_torchs: Kwargs = {
    name: vars(theirs)[name]
    for name in ("fully_shard", "register_fsdp_forward_method", "share_comm_ctx")
    if name in vars(theirs)
}
# where torch itself has them; whoever else has them already keeps them, and is told so
_HOMES = (
    "torch.distributed.fsdp",
    "torch.distributed.fsdp._fully_shard",
    "torch.distributed.fsdp._fully_shard._fully_shard",
    "torch.distributed._composable.fsdp",
    "torch.distributed._composable.fsdp.fully_shard",
    "torch.distributed.pipelining.stage",
)


@functools.wraps(_torchs["fully_shard"])
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


def install() -> None:
    """Makes torch's ``fully_shard`` and what belongs to it shardkit's from here on, in spawned processes too.

    Programs started anew, such as torchrun's ranks, install it themselves (``torchrun -m shardkit run-as-fsdp2
    train.py``). A second call changes nothing.

    Raises:
        LifecycleError: a module that is no part of torch has imported torch's function already.
    """
    if is_installed():
        return
    for name, module in list(sys.modules.items()):
        has = isinstance(module, ModuleType) and vars(module).get("fully_shard") is _torchs["fully_shard"]
        if has and name.partition(".")[0] != "torch":
            raise LifecycleError(
                f"{name} has imported torch's fully_shard already, and keeps it; call shardkit.torch_fsdp2.install() "
                "before the first import of what calls it"
            )
    _replace(_OURS)
    if importlib.util.find_spec("accelerate") is not None:
        from accelerate.state import AcceleratorState

        AcceleratorState.__init__ = _with_plugin_on_cpus(AcceleratorState.__init__)
    install_in_children(__name__)


def uninstall() -> None:
    """Ends what :func:`install` began. What has been sharded or imported meanwhile stays what it is."""
    if is_installed():
        _replace(_torchs)
        if "accelerate.state" in sys.modules:
            from accelerate.state import AcceleratorState

            begin = AcceleratorState.__init__
            AcceleratorState.__init__ = getattr(begin, "__wrapped__", begin)
        install_in_children(__name__, False)


def _with_plugin_on_cpus(begin: AnyCallable) -> AnyCallable:
    """Makes accelerate take its plug-in for FSDP2 where ranks are CPUs, too: it would take DDP there, in silence."""

    @functools.wraps(begin)
    def begin_with_plugin(self: Tree, *args: Tree, fsdp_plugin: Tree = None, **kwargs: Tree) -> None:
        begin(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if self.distributed_type == "MULTI_CPU" and fsdp_plugin is not None and fsdp_plugin.fsdp_version == 2:
            from accelerate.state import DistributedType, PartialState

            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin
            # from where it is read each time
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP
            if self.mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(self.mixed_precision)

    return begin_with_plugin


def is_installed() -> bool:
    """Says whether torch's ``fully_shard`` is shardkit's."""
    return vars(theirs)["fully_shard"] is fully_shard


def _replace(by: Kwargs) -> None:
    known = [*_torchs.values(), *_OURS.values()]
    for home in _HOMES:
        module = sys.modules.get(home)
        for name in _torchs if module is not None else ():
            if any(vars(module).get(name) is one for one in known):
                setattr(module, name, by[name])


_OURS: Kwargs = {name: globals().get(name, getattr(ours, name, None)) for name in _torchs}
