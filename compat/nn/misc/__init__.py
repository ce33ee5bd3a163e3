"""fairscale.nn.misc."""

from shardkit.flattening.bucket import GradBucket, ParamBucket

from ..checkpoint import checkpoint_wrapper
from .flatten_params_wrapper import FlattenParamsWrapper

__all__ = [
    "FlattenParamsWrapper",
    "GradBucket",
    "ParamBucket",
    "checkpoint_wrapper",
]
