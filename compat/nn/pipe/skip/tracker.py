"""fairscale.nn.pipe.skip.tracker. Skip tensors that a thread has stashed."""

from shardkit.nn.pipe.checkpoint import is_checkpointing
from shardkit.nn.pipe.dependency import fork, join
from shardkit.nn.pipe.microbatch import Batch
from shardkit.nn.pipe.skip.layout import SkipLayout
from shardkit.nn.pipe.skip.namespace import Namespace
from shardkit.nn.pipe.skip.portal import Portal
from shardkit.redirected import redirected, redirected_function, redirected_names

__all__ = [
    "Batch",
    "Namespace",
    "Portal",
    "SkipLayout",
    "SkipTracker",
    "SkipTrackerThroughPotals",
    "ThreadLocal",
    "current_skip_tracker",
    "fork",
    "is_checkpointing",
    "join",
    "use_skip_tracker",
]

_MOVED = {
    "instead": "shardkit.nn.pipe.skip.skippable",
    "why": "skip tensors are arguments and results that autograd sees",
}

SkipTracker = redirected("nn.pipe.skip.tracker.SkipTracker", **_MOVED)
SkipTrackerThroughPotals = redirected("nn.pipe.skip.tracker.SkipTrackerThroughPotals", **_MOVED)
ThreadLocal = redirected("nn.pipe.skip.tracker.ThreadLocal", **_MOVED)
current_skip_tracker = redirected_function("nn.pipe.skip.tracker.current_skip_tracker", **_MOVED)
use_skip_tracker = redirected_function("nn.pipe.skip.tracker.use_skip_tracker", **_MOVED)

__getattr__ = redirected_names(__name__, ["thread_local"], **_MOVED)
