"""fairscale.experimental.nn.distributed_pipeline.loss. Stages on RPC workers."""

from shardkit.redirected import redirected_function

__all__ = [
    "DistributedLoss",
]

_MOVED = {
    "instead": "torch.distributed.pipelining.PipelineStage and ScheduleGPipe",
    "why": "it is built on torch.distributed.rpc and RemoteModule, which torch no longer develops",
}

DistributedLoss = redirected_function("experimental.nn.distributed_pipeline.loss.DistributedLoss", **_MOVED)
