"""fairscale.nn.misc."""

from ..checkpoint import checkpoint_wrapper
from .flatten_params_wrapper import FlattenParamsWrapper

__all__ = ["FlattenParamsWrapper", "checkpoint_wrapper"]
