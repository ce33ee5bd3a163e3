"""fairscale.nn.pipe.pipeline. What Pipe ran."""

from shardkit.nn.pipe.checkpoint import Checkpointing
from shardkit.nn.pipe.copy import Copy, Wait
from shardkit.nn.pipe.dependency import fork, join
from shardkit.nn.pipe.microbatch import Batch
from shardkit.nn.pipe.skip.layout import SkipLayout
from shardkit.nn.pipe.skip.tracker import SkipTrackerThroughPotals, use_skip_tracker
from shardkit.nn.pipe.stream import current_stream, use_device
from shardkit.nn.pipe.types import TensorOrTensors, Tensors
from shardkit.nn.pipe.worker import Task, create_workers, join_workers
from shardkit.pipeline.schedule import ticks as clock_cycles
from shardkit.redirected import redirected, redirected_function, redirected_names

__all__ = [
    "Batch",
    "Checkpointing",
    "Copy",
    "Pipeline",
    "SkipLayout",
    "SkipTrackerThroughPotals",
    "Task",
    "TensorOrTensors",
    "Tensors",
    "Wait",
    "clock_cycles",
    "copy",
    "create_workers",
    "current_stream",
    "depend",
    "fork",
    "join",
    "join_workers",
    "use_device",
    "use_skip_tracker",
    "wait",
]

_MOVED = {
    "instead": "shardkit.nn.pipe.Pipe",
    "why": "fences and streams have no place in it any more",
}

Pipeline = redirected("nn.pipe.pipeline.Pipeline", **_MOVED)
copy = redirected_function("nn.pipe.pipeline.copy", **_MOVED)
depend = redirected_function("nn.pipe.pipeline.depend", **_MOVED)
wait = redirected_function("nn.pipe.pipeline.wait", **_MOVED)

__getattr__ = redirected_names(__name__, ["ExcInfo"], **_MOVED)
