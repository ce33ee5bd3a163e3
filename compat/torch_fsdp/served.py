"""Torch's names that are shardkit's in a process: what the doors for FSDP1 and FSDP2 have in common."""

from __future__ import annotations

import functools
import importlib.util
import sys
from types import ModuleType

from shardkit.compat import install_in_children
from shardkit.errors import ConfigurationError, LifecycleError
from shardkit.types import AnyCallable, Kwargs, Tree


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
        for theirs, ours in modules.items():
            for name in ours.__all__:
                if vars(theirs).get(name, vars(ours)[name]) is not vars(ours)[name]:
                    self._theirs[name], self._ours[name] = vars(theirs)[name], vars(ours)[name]

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
