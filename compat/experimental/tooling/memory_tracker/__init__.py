"""Memory of a step, layer by layer: a tracker, its traces, plots of them, and where to checkpoint."""

from collections.abc import Iterator
from contextlib import contextmanager

from .traces import (
    LayerMemoryTrace,
    LayerwiseMemoryTrackerSummary,
    SuggestedCheckpoints,
    TraceBackwardEvent,
    TraceForwardEvent,
    compare_memory_traces_in_plot,
    find_best_reset_points,
    matplotlib_figure_to_image,
    suggest_checkpoint_location,
)
from .tracker import LayerwiseMemoryTracker, ProcessGroupTracker, ProcessGroupTrackingEvent

__all__ = [
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
    "suggest_checkpoint_location",
]


@contextmanager
def null_context() -> Iterator[None]:
    yield
