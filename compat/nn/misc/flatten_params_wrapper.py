"""fairscale.nn.misc.flatten_params_wrapper."""

from __future__ import annotations

from typing import Any

from torch import nn

from shardkit.flattening.flat_parameter import FlatParameter, ParamGroups
from shardkit.flattening.keys import WRAPPED, rename_prefix
from shardkit.flattening.wrapper import FlattenParamsWrapper
from shardkit.internal.state_dict import replace_by_prefix_

__all__ = ["FlatParameter", "FlattenParamsWrapper", "ParamGroups", "replace_by_prefix_"]


# Named by wrappers that fairscale has pickled.
def _post_state_dict_hook(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, *args: Any
) -> dict[str, Any]:
    rename_prefix(state_dict, f"{prefix}{WRAPPED}.", prefix)
    return state_dict


def _pre_load_state_dict_hook(state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
    """Nothing is left to do: the wrapper has translated the keys."""
