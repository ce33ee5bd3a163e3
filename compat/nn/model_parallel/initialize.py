"""fairscale.nn.model_parallel.initialize."""

from __future__ import annotations

from typing import Any

from shardkit.model_parallel.groups import (
    destroy_model_parallel,
    ensure_divisibility,
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

__all__ = [
    "destroy_model_parallel",
    "ensure_divisibility",
    "get_context_parallel_group",
    "get_context_parallel_rank",
    "get_context_parallel_ranks",
    "get_context_parallel_world_size",
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
    "model_parallel_is_initialized",
]

_READ = {
    "_CONTEXT_PARALLEL_GROUP": get_context_parallel_group,
    "_CONTEXT_PARALLEL_GROUP_RANKS": get_context_parallel_ranks,
    "_DATA_PARALLEL_GROUP": get_data_parallel_group,
    "_DATA_PARALLEL_RANKS": get_data_parallel_ranks,
    "_MODEL_PARALLEL_GROUP": get_model_parallel_group,
    "_PIPELINE_PARALLEL_GROUP": get_pipeline_parallel_group,
    "_PIPELINE_PARALLEL_RANKS": get_pipeline_parallel_ranks,
}


def __getattr__(name: str) -> Any:
    """fairscale's module variables, which existing code reads to learn whether the groups exist."""
    if name not in _READ:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _READ[name]() if model_parallel_is_initialized() else None
