"""Interfaces of others than fairscale that shardkit has too, on request: torch_xla's FSDP, and torch's FSDP1."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

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
    """Those that were asked for.

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
        """Where shardkit has a module, or what is below it."""
        for theirs, ours in self._modules.items():
            if path == theirs or path.startswith(f"{theirs}."):
                return ours + path.removeprefix(theirs)
        return None

    def objection(self, path: str, names: Sequence[str]) -> str | None:
        """What is to be said about ``from path import names`` in place of rewriting it; None if it works."""
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
