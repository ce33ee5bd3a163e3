"""fairscale.nn.model_parallel.random."""

from shardkit.model_parallel.random import (
    CheckpointFunction,
    CudaRNGStatesTracker,
    checkpoint,
    get_cuda_rng_tracker,
    model_parallel_cuda_manual_seed,
)

from .initialize import get_data_parallel_rank, get_model_parallel_rank

__all__ = [
    "CheckpointFunction",
    "CudaRNGStatesTracker",
    "checkpoint",
    "get_cuda_rng_tracker",
    "get_data_parallel_rank",
    "get_model_parallel_rank",
    "model_parallel_cuda_manual_seed",
]
