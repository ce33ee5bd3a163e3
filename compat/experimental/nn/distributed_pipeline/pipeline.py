"""fairscale.experimental.nn.distributed_pipeline.pipeline. Stages on RPC workers."""

from shardkit.experimental.nn.distributed_pipeline.data import DataConsumer
from shardkit.experimental.nn.distributed_pipeline.graph import Node, PipelineModulesGraph
from shardkit.experimental.nn.distributed_pipeline.partition_handler import (
    DistributedPipelineRecord,
    PartitionHandler,
)
from shardkit.internal.version import torch_version
from shardkit.nn.pipe import microbatch
from shardkit.redirected import redirected, redirected_function, redirected_names

__all__ = [
    "DataConsumer",
    "DistributedPipeline",
    "DistributedPipelineRecord",
    "Node",
    "PartitionHandler",
    "PipelineModulesGraph",
    "check_pytorch_version",
    "microbatch",
    "torch_version",
]

_MOVED = {
    "instead": "torch.distributed.pipelining.PipelineStage and ScheduleGPipe",
    "why": "it is built on torch.distributed.rpc and RemoteModule, which torch no longer develops",
}

DistributedPipeline = redirected(
    "experimental.nn.distributed_pipeline.pipeline.DistributedPipeline", **_MOVED
)
check_pytorch_version = redirected_function(
    "experimental.nn.distributed_pipeline.pipeline.check_pytorch_version", **_MOVED
)

__getattr__ = redirected_names(__name__, ["Device", "MOVING_DENIED"], **_MOVED)
