"""fairscale.internal.state_dict."""

from __future__ import annotations

from torch import nn

from shardkit.errors import ConfigurationError
from shardkit.flattening.keys import rename_prefix
from shardkit.types import StateDict


def find_module_instances(module: nn.Module, search_class: type[nn.Module]) -> list[tuple[str, nn.Module]]:
    """All modules of a class in the tree, with their prefixes in a state dict (``"0.linear."``).

    A module that has several names within its parent is listed once there.
    """
    found = [("", module)] if isinstance(module, search_class) else []
    for name, child in module.named_children():
        found += [(f"{name}.{prefix}", m) for prefix, m in find_module_instances(child, search_class)]
    return found


def replace_by_prefix_(state_dict: StateDict, old_prefix: str, new_prefix: str) -> None:
    """Keys that begin with ``old_prefix`` begin with ``new_prefix`` afterwards, in place.

    Raises:
        ConfigurationError: the prefixes are equal.
    """
    if old_prefix == new_prefix:
        raise ConfigurationError(f"old_prefix and new_prefix are both {old_prefix!r}; they have to differ")
    rename_prefix(state_dict, old_prefix, new_prefix)
