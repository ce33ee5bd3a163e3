"""fairscale.experimental.nn.distributed_pipeline.trace. Stages on RPC workers."""

from shardkit.experimental.nn.distributed_pipeline.graph import PipelineModulesGraph
from shardkit.redirected import redirected, redirected_function

__all__ = [
    "GraphCreator",
    "PipelineModulesGraph",
    "RemoteModuleTracer",
    "make_graph",
]

_MOVED = {
    "instead": "torch.distributed.pipelining.PipelineStage and ScheduleGPipe",
    "why": "it is built on torch.distributed.rpc and RemoteModule, which torch no longer develops",
}

GraphCreator = redirected("experimental.nn.distributed_pipeline.trace.GraphCreator", **_MOVED)
RemoteModuleTracer = redirected("experimental.nn.distributed_pipeline.trace.RemoteModuleTracer", **_MOVED)
make_graph = redirected_function("experimental.nn.distributed_pipeline.trace.make_graph", **_MOVED)
