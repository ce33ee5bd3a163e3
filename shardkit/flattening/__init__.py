"""Several parameters as one flat one, without sharding."""

from .flat_parameter import FlatParameter
from .wrapper import FlattenParamsWrapper

__all__ = ["FlatParameter", "FlattenParamsWrapper"]
