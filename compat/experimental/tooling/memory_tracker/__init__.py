"""Memory of a step, layer by layer: a tracker, its traces, plots of them, and where to checkpoint."""

from .checkpoint_places import SuggestedCheckpoints, find_best_reset_points, suggest_checkpoint_location
from .plots import compare_memory_traces_in_plot, matplotlib_figure_to_image
from .traces import LayerMemoryTrace, LayerwiseMemoryTrackerSummary, TraceBackwardEvent, TraceForwardEvent
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
