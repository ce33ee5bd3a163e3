"""fairscale.nn.misc."""

from .flatten_params_wrapper import FlattenParamsWrapper

__all__ = ["FlattenParamsWrapper"]
