"""fairscale.nn.pipe.async_schedule. The event loop of a stage that is a rank."""

from shardkit.nn.model_parallel.initialize import get_pipeline_parallel_ranks
from shardkit.nn.pipe.checkpoint import Checkpointing
from shardkit.nn.pipe.messages import Transport
from shardkit.nn.pipe.microbatch import Batch
from shardkit.nn.pipe.skip.tracker import SkipTrackerThroughPotals, use_skip_tracker
from shardkit.nn.pipe.types import PipeMessage
from shardkit.nn.pipe.worker import Task
from shardkit.redirected import redirected, redirected_function, redirected_names

__all__ = [
    "AsyncEventLoop",
    "AsyncMessageBody",
    "AsyncMessageType",
    "AsyncRecvOperator",
    "AutogradWithoutActivations",
    "Batch",
    "Checkpointing",
    "Invocation",
    "Location",
    "ModuleWrapper",
    "PipeMessage",
    "SkipTrackerThroughPotals",
    "TailBackwardContext",
    "Task",
    "Transport",
    "create_task",
    "get_pipeline_parallel_ranks",
    "use_skip_tracker",
]

_MOVED = {
    "instead": "shardkit.nn.pipe.AsyncPipe, or torch.distributed.pipelining",
    "why": "a stage sends and receives in a fixed order, without an event loop",
}

AsyncEventLoop = redirected("nn.pipe.async_schedule.AsyncEventLoop", **_MOVED)
AsyncMessageBody = redirected("nn.pipe.async_schedule.AsyncMessageBody", **_MOVED)
AsyncMessageType = redirected("nn.pipe.async_schedule.AsyncMessageType", **_MOVED)
AsyncRecvOperator = redirected("nn.pipe.async_schedule.AsyncRecvOperator", **_MOVED)
AutogradWithoutActivations = redirected("nn.pipe.async_schedule.AutogradWithoutActivations", **_MOVED)
Invocation = redirected("nn.pipe.async_schedule.Invocation", **_MOVED)
Location = redirected("nn.pipe.async_schedule.Location", **_MOVED)
ModuleWrapper = redirected("nn.pipe.async_schedule.ModuleWrapper", **_MOVED)
TailBackwardContext = redirected("nn.pipe.async_schedule.TailBackwardContext", **_MOVED)
create_task = redirected_function("nn.pipe.async_schedule.create_task", **_MOVED)

__getattr__ = redirected_names(__name__, ["Activations", "Invocations"], **_MOVED)
