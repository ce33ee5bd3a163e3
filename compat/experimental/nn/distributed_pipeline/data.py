"""fairscale.experimental.nn.distributed_pipeline.data. Stages on RPC workers."""

from shardkit.redirected import redirected

__all__ = [
    "DataConsumer",
]

_MOVED = {
    "instead": "torch.distributed.pipelining.PipelineStage and ScheduleGPipe",
    "why": "it is built on torch.distributed.rpc and RemoteModule, which torch no longer develops",
}

DataConsumer = redirected("experimental.nn.distributed_pipeline.data.DataConsumer", **_MOVED)
