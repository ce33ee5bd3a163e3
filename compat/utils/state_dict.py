"""The path of fairscale.internal.state_dict before fairscale 0.4.7."""

from shardkit.internal.state_dict import find_module_instances, replace_by_prefix_

__all__ = ["find_module_instances", "replace_by_prefix_"]
