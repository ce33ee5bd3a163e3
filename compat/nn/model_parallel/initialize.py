"""fairscale.nn.model_parallel.initialize."""

from __future__ import annotations

from typing import Any

from shardkit.compat.redirected import redirected_names
from shardkit.model_parallel import groups

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
_functions = redirected_names(__name__)


def __getattr__(name: str) -> Any:
    """Returns functions of :mod:`shardkit.model_parallel.groups`, and fairscale's variables as they are now."""
    if name not in _VARIABLES:
        return _functions(name)
    return _VARIABLES[name]() if groups.model_parallel_is_initialized() else None
