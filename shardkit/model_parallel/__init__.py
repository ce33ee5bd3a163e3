"""Layers split over ranks (tensor parallelism): fairscale's names, on any device that a process group carries."""

from .cross_entropy import vocab_parallel_cross_entropy
from .groups import (
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
    model_parallel_is_initialized,
)
from .layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear, VocabParallelEmbedding
from .random import checkpoint, get_cuda_rng_tracker, model_parallel_cuda_manual_seed
from .regions import (
    copy_to_model_parallel_region,
    gather_from_model_parallel_region,
    reduce_from_model_parallel_region,
    scatter_to_model_parallel_region,
)

__all__ = [
    "ColumnParallelLinear",
    "ParallelEmbedding",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "checkpoint",
    "copy_to_model_parallel_region",
    "destroy_model_parallel",
    "gather_from_model_parallel_region",
    "get_context_parallel_group",
    "get_context_parallel_rank",
    "get_context_parallel_ranks",
    "get_context_parallel_world_size",
    "get_cuda_rng_tracker",
    "get_data_parallel_group",
    "get_data_parallel_rank",
    "get_data_parallel_ranks",
    "get_data_parallel_world_size",
    "get_model_parallel_group",
    "get_model_parallel_rank",
    "get_model_parallel_src_rank",
    "get_model_parallel_world_size",
    "get_pipeline_parallel_group",
    "get_pipeline_parallel_ranks",
    "initialize_model_parallel",
    "model_parallel_cuda_manual_seed",
    "model_parallel_is_initialized",
    "reduce_from_model_parallel_region",
    "scatter_to_model_parallel_region",
    "vocab_parallel_cross_entropy",
]
