"""Interfaces of others than fairscale that shardkit has too, on request: torch_xla's FSDP, and torch's FSDP1."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from types import ModuleType

from shardkit.compat import PARTS
from shardkit.compat.redirected import MARK, is_redirected

# Their modules, with all below them, and where shardkit has them.
_XLA = {
    "torch_xla.distributed.fsdp": "shardkit.xla.fsdp",
    "torch_xla.distributed.zero_redundancy_optimizer": "shardkit.xla.zero_redundancy_optimizer",
}
_TORCH_FSDP = {
    "torch.distributed.fsdp": "shardkit.torch_fsdp",
    "torch.distributed.checkpoint.state_dict": "shardkit.torch_fsdp.state_dict",
}


class Interfaces:
    """Holds those that were asked for.

    Attributes:
        packages: whose imports are looked at.
        words: one of them is in a source that is to be rewritten.
    """

    def __init__(self, xla: bool, torch_fsdp: bool) -> None:
        self._modules = {**(_XLA if xla else {}), **(_TORCH_FSDP if torch_fsdp else {})}
        self.packages = tuple(dict.fromkeys(path.split(".")[0] for path in self._modules))
        self.words = (
            *(("torch_xla",) if xla else ()),
            *(("fsdp", "checkpoint.state_dict") if torch_fsdp else ()),
        )

    def ours(self, path: str) -> str | None:
        """Finds where shardkit has a module, or what is below it."""
        for theirs, ours in self._modules.items():
            if path == theirs or path.startswith(f"{theirs}."):
                return ours + path.removeprefix(theirs)
        return None

    def objection(self, path: str, names: Sequence[str]) -> str | None:
        """Returns what is to be said about ``from path import names`` in place of rewriting it; None if it works."""
        ours = self.ours(path)
        if ours is None:
            return self._objection_to_module(path, names)
        if path.startswith("torch_xla"):
            return None
        try:
            module = importlib.import_module(ours)
        except ImportError:
            return f"left as it is: shardkit has no {ours}"
        lacking = [n for n in names if n != "*" and not hasattr(module, n)]
        if not lacking:
            return None
        said = f"left as it is: {ours} has no {', '.join(lacking)}"
        if "fully_shard" in lacking:
            said += "; shardkit.fully_shard takes the arguments of torch's"
        return said if len(lacking) == len(names) else f"{said}; make it two imports"

    def _objection_to_module(self, path: str, names: Sequence[str]) -> str | None:
        for name in names:
            ours = self.ours(f"{path}.{name}")
            if ours is not None and len(names) > 1:
                return (
                    f"left as it is: imports more of {path.split('.')[0]} than what shardkit has; make it two"
                )
            if ours is not None and ours.rpartition(".")[2] != name:
                package, _, own = ours.rpartition(".")
                return f"left as it is: write 'from {package} import {own} as {name}'"
        return None


# ------------------------------------------------------------ names of fairscale
_VERSION = "shardkit has versions of its own, and fairscale's interface in all of them: drop this check"


def no_module(path: str, *, star: bool = False) -> str | None:
    """Returns what to say about ``import path`` or, with ``star``, ``from path import *``; None if it just works."""
    if path == "fairscale" and star:
        return "all of shardkit's own names come in, where fairscale gives none: drop this import"
    if path == "fairscale.version":
        return _VERSION
    return f"shardkit has no {_ours(path)}" if _module(path) is None else None


@functools.cache
def objection(path: str, name: str = "") -> str | None:
    """Returns what is to be said about ``from path import name``, or about using ``path``; None if it just works.

    Args:
        path: begins with ``fairscale``. Without ``name``, what is looked up in a class or a function is not judged.
        name: "" for none.
    """
    if name:
        module = _module(path)
        return no_module(path) if module is None else _object(module, path, name)
    here, at = _module("fairscale"), "fairscale"
    for part in path.split(".")[1:]:
        if not isinstance(here, ModuleType):
            return None
        said = _object(here, at, part)
        if said is not None:
            return said
        at = f"{at}.{part}"
        here = getattr(here, part, None) or _module(at)
    return None


def _object(module: ModuleType, path: str, name: str) -> str | None:
    if path == "fairscale" and name not in PARTS:
        return _VERSION if "version" in name else f"shardkit has no part {name} of fairscale"
    if not hasattr(module, name) and _module(f"{path}.{name}") is None:
        return f"shardkit has no {_ours(path)}.{name}"
    found = getattr(module, name, None)
    return str(getattr(found, MARK)) if is_redirected(found) else None


@functools.cache
def _module(path: str) -> ModuleType | None:
    below = path.removeprefix("fairscale").removeprefix(".")
    if below and below.partition(".")[0] not in PARTS:
        return None
    try:
        return importlib.import_module(_ours(path))
    except ImportError:
        return None


def _ours(path: str) -> str:
    return "shardkit" + path.removeprefix("fairscale")
