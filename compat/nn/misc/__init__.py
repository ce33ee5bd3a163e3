"""fairscale.nn.misc."""

from ..checkpoint import checkpoint_wrapper
from .flatten_params_wrapper import FlattenParamsWrapper
from .param_bucket import GradBucket, ParamBucket

__all__ = [
    "FlattenParamsWrapper",
    "GradBucket",
    "ParamBucket",
    "checkpoint_wrapper",
]
