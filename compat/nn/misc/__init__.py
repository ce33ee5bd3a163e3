"""fairscale.nn.misc."""

from torch import nn

from shardkit.flattening.bucket import GradBucket, ParamBucket
from shardkit.flattening.wrapper import WRAPPED, FlattenParamsWrapper, rename_prefix
from shardkit.types import StateDict

from ..checkpoint import checkpoint_wrapper

__all__ = ["FlattenParamsWrapper", "GradBucket", "ParamBucket", "checkpoint_wrapper"]


# Named by wrappers that fairscale has pickled.
def _post_state_dict_hook(module: nn.Module, state_dict: StateDict, prefix: str, *args: object) -> StateDict:
    rename_prefix(state_dict, f"{prefix}{WRAPPED}.", prefix)
    return state_dict


def _pre_load_state_dict_hook(state_dict: StateDict, prefix: str, *args: object) -> None:
    """Does nothing: the wrapper has translated the keys."""
