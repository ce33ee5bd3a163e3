"""fairscale.nn.model_parallel.layers."""

from shardkit.compat.redirected import redirected_names
from shardkit.model_parallel.layers import (
    ColumnParallelLinear,
    ParallelEmbedding,
    RowParallelLinear,
    VocabParallelEmbedding,
)

__all__ = ["ColumnParallelLinear", "ParallelEmbedding", "RowParallelLinear", "VocabParallelEmbedding"]

__getattr__ = redirected_names(__name__)
