"""fairscale.nn.model_parallel.mappings."""

from shardkit.model_parallel.regions import (
    copy_to_model_parallel_region,
    gather_from_model_parallel_region,
    reduce_from_model_parallel_region,
    scatter_to_model_parallel_region,
)

from .initialize import get_model_parallel_group
from .utils import split_tensor_along_last_dim

__all__ = [
    "copy_to_model_parallel_region",
    "gather_from_model_parallel_region",
    "get_model_parallel_group",
    "reduce_from_model_parallel_region",
    "scatter_to_model_parallel_region",
    "split_tensor_along_last_dim",
]
