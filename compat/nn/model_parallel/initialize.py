"""fairscale.nn.model_parallel.initialize."""

from __future__ import annotations

from typing import Any

from shardkit.model_parallel import groups
from shardkit.model_parallel.groups import *  # noqa: F403
from shardkit.model_parallel.groups import ensure_divisibility  # noqa: F401

# fairscale's module variables, which existing code reads to learn whether the groups exist
_VARIABLES = {
    "_CONTEXT_PARALLEL_GROUP": groups.get_context_parallel_group,
    "_CONTEXT_PARALLEL_GROUP_RANKS": groups.get_context_parallel_ranks,
    "_DATA_PARALLEL_GROUP": groups.get_data_parallel_group,
    "_DATA_PARALLEL_RANKS": groups.get_data_parallel_ranks,
    "_MODEL_PARALLEL_GROUP": groups.get_model_parallel_group,
    "_PIPELINE_PARALLEL_GROUP": groups.get_pipeline_parallel_group,
    "_PIPELINE_PARALLEL_RANKS": groups.get_pipeline_parallel_ranks,
}


def __getattr__(name: str) -> Any:
    """Returns fairscale's variables as they are now."""
    if name not in _VARIABLES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _VARIABLES[name]() if groups.model_parallel_is_initialized() else None
