"""fairscale.nn.model_parallel.layers."""

from shardkit.model_parallel.layers import (
    ColumnParallelLinear,
    ParallelEmbedding,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from shardkit.redirected import redirected_names

__all__ = ["ColumnParallelLinear", "ParallelEmbedding", "RowParallelLinear", "VocabParallelEmbedding"]

__getattr__ = redirected_names(__name__)
