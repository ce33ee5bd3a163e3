"""Several parameters as one flat one, without sharding."""

from .wrapper import FlatParameter, FlattenParamsWrapper

__all__ = ["FlatParameter", "FlattenParamsWrapper"]
