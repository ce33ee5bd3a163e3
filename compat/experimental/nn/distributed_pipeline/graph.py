"""fairscale.experimental.nn.distributed_pipeline.graph. Stages on RPC workers."""

from shardkit.experimental.nn.distributed_pipeline.data import DataConsumer
from shardkit.redirected import redirected, redirected_function, redirected_names

__all__ = [
    "DataConsumer",
    "DataSource",
    "MultiInputSequential",
    "Node",
    "PipelineModulesGraph",
    "RemoteSequential",
]

_MOVED = {
    "instead": "torch.distributed.pipelining.PipelineStage and ScheduleGPipe",
    "why": "it is built on torch.distributed.rpc and RemoteModule, which torch no longer develops",
}

DataSource = redirected("experimental.nn.distributed_pipeline.graph.DataSource", **_MOVED)
MultiInputSequential = redirected("experimental.nn.distributed_pipeline.graph.MultiInputSequential", **_MOVED)
Node = redirected("experimental.nn.distributed_pipeline.graph.Node", **_MOVED)
PipelineModulesGraph = redirected("experimental.nn.distributed_pipeline.graph.PipelineModulesGraph", **_MOVED)
RemoteSequential = redirected_function(
    "experimental.nn.distributed_pipeline.graph.RemoteSequential", **_MOVED
)

__getattr__ = redirected_names(__name__, ["NodeDataConsumer"], **_MOVED)
