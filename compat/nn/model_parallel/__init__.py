"""fairscale.nn.model_parallel."""

from shardkit.model_parallel.groups import (
    destroy_model_parallel,
    get_context_parallel_group,
    get_context_parallel_rank,
    get_context_parallel_ranks,
    get_context_parallel_world_size,
    get_data_parallel_group,
    get_data_parallel_rank,
    get_data_parallel_ranks,
    get_data_parallel_world_size,
    get_model_parallel_group,
    get_model_parallel_rank,
    get_model_parallel_src_rank,
    get_model_parallel_world_size,
    get_pipeline_parallel_group,
    get_pipeline_parallel_ranks,
    initialize_model_parallel,
)
from shardkit.model_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from shardkit.model_parallel.random import get_cuda_rng_tracker, model_parallel_cuda_manual_seed
from shardkit.model_parallel.regions import (
    copy_to_model_parallel_region,
    gather_from_model_parallel_region,
    vocab_parallel_cross_entropy,
)

__all__: list[str] = []  # fairscale's is empty too
