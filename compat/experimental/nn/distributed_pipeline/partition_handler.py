"""fairscale.experimental.nn.distributed_pipeline.partition_handler. Stages on RPC workers."""

from shardkit.experimental.nn.distributed_pipeline.data import DataConsumer
from shardkit.nn.pipe import microbatch
from shardkit.nn.pipe.checkpoint import Checkpointing
from shardkit.nn.pipe.dependency import fork, join
from shardkit.nn.pipe.microbatch import Batch
from shardkit.nn.pipe.stream import as_cuda, current_stream, is_cuda, use_device, use_stream
from shardkit.nn.pipe.worker import Task, create_workers
from shardkit.redirected import redirected, redirected_names

__all__ = [
    "Batch",
    "Checkpointing",
    "DataConsumer",
    "DistributedPipelineRecord",
    "PartitionHandler",
    "Task",
    "as_cuda",
    "create_workers",
    "current_stream",
    "fork",
    "is_cuda",
    "join",
    "microbatch",
    "use_device",
    "use_stream",
]

_MOVED = {
    "instead": "torch.distributed.pipelining.PipelineStage and ScheduleGPipe",
    "why": "it is built on torch.distributed.rpc and RemoteModule, which torch no longer develops",
}

DistributedPipelineRecord = redirected(
    "experimental.nn.distributed_pipeline.partition_handler.DistributedPipelineRecord", **_MOVED
)
PartitionHandler = redirected(
    "experimental.nn.distributed_pipeline.partition_handler.PartitionHandler", **_MOVED
)

__getattr__ = redirected_names(__name__, ["ExcInfo"], **_MOVED)
