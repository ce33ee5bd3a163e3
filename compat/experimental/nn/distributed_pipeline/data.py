"""fairscale.experimental.nn.distributed_pipeline.data. Stages on RPC workers."""

from shardkit.redirected import redirected, redirected_names

__all__ = [
    "DataConsumer",
]

_MOVED = {
    "instead": "torch.distributed.pipelining.PipelineStage and ScheduleGPipe",
    "why": "it is built on torch.distributed.rpc and RemoteModule, which torch no longer develops",
}

DataConsumer = redirected("experimental.nn.distributed_pipeline.data.DataConsumer", **_MOVED)

__getattr__ = redirected_names(__name__, ["ConsumerType"], **_MOVED)
