"""fairscale.experimental.nn.ampnet_pipe.ampnet. Asynchronous updates in a pipeline (AMPNet)."""

from shardkit.nn.model_parallel.initialize import get_pipeline_parallel_ranks
from shardkit.nn.pipe.async_schedule import (
    AsyncMessageBody,
    AsyncMessageType,
    AsyncRecvOperator,
    Location,
    ModuleWrapper,
)
from shardkit.nn.pipe.checkpoint import Checkpointing
from shardkit.nn.pipe.messages import Transport
from shardkit.nn.pipe.microbatch import Batch
from shardkit.nn.pipe.types import PipeMessage
from shardkit.nn.pipe.worker import Task
from shardkit.redirected import redirected, redirected_function

__all__ = [
    "AsyncAMPnetEventLoop",
    "AsyncMessageBody",
    "AsyncMessageType",
    "AsyncRecvOperator",
    "Batch",
    "Checkpointing",
    "Location",
    "ModuleWrapper",
    "PipeMessage",
    "Task",
    "Transport",
    "create_task_without_skip_trackers",
    "get_pipeline_parallel_ranks",
]

_MOVED = {
    "instead": "torch.distributed.pipelining.Schedule1F1B",
    "why": "stages step their optimizers with weights of different ages, which trains another model than the one given",
}

AsyncAMPnetEventLoop = redirected("experimental.nn.ampnet_pipe.ampnet.AsyncAMPnetEventLoop", **_MOVED)
create_task_without_skip_trackers = redirected_function(
    "experimental.nn.ampnet_pipe.ampnet.create_task_without_skip_trackers", **_MOVED
)
