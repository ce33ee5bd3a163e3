"""fairscale.experimental.tooling.layer_memory_tracker: memory of a step, layer by layer."""

from collections.abc import Iterator
from contextlib import contextmanager

from shardkit.extra.memory_tracker import (
    LayerMemoryTrace,
    LayerwiseMemoryTracker,
    LayerwiseMemoryTrackerSummary,
    ProcessGroupTracker,
    ProcessGroupTrackingEvent,
    SuggestedCheckpoints,
    TraceBackwardEvent,
    TraceForwardEvent,
    compare_memory_traces_in_plot,
    find_best_reset_points,
    matplotlib_figure_to_image,
    suggest_checkpoint_location,
)
from shardkit.nn.data_parallel import FullyShardedDataParallel

__all__ = [
    "FullyShardedDataParallel",
    "LayerMemoryTrace",
    "LayerwiseMemoryTracker",
    "LayerwiseMemoryTrackerSummary",
    "ProcessGroupTracker",
    "ProcessGroupTrackingEvent",
    "SuggestedCheckpoints",
    "TraceBackwardEvent",
    "TraceForwardEvent",
    "compare_memory_traces_in_plot",
    "find_best_reset_points",
    "matplotlib_figure_to_image",
    "null_context",
    "suggest_checkpoint_location",
]


@contextmanager
def null_context() -> Iterator[None]:
    """Does nothing."""
    yield
