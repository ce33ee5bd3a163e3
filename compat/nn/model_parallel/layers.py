"""fairscale.nn.model_parallel.layers."""

from shardkit.model_parallel.layers import (
    ColumnParallelLinear,
    ParallelEmbedding,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from shardkit.model_parallel.layers import initialize_affine_weight as _initialize_affine_weight

from .initialize import get_model_parallel_rank, get_model_parallel_world_size
from .mappings import (
    copy_to_model_parallel_region,
    gather_from_model_parallel_region,
    reduce_from_model_parallel_region,
    scatter_to_model_parallel_region,
)
from .utils import VocabUtility, divide_and_check_no_remainder

__all__ = [
    "ColumnParallelLinear",
    "ParallelEmbedding",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "VocabUtility",
    "_initialize_affine_weight",
    "copy_to_model_parallel_region",
    "divide_and_check_no_remainder",
    "gather_from_model_parallel_region",
    "get_model_parallel_rank",
    "get_model_parallel_world_size",
    "reduce_from_model_parallel_region",
    "scatter_to_model_parallel_region",
]
