"""fairscale.experimental.nn.ampnet_pipe.pipe. Asynchronous updates in a pipeline (AMPNet)."""

from shardkit.experimental.nn.ampnet_pipe.ampnet import AsyncAMPnetEventLoop
from shardkit.nn.pipe.async_pipe import AsyncPipe
from shardkit.redirected import redirected

__all__ = [
    "AMPnetPipe",
    "AsyncAMPnetEventLoop",
    "AsyncPipe",
]

_MOVED = {
    "instead": "torch.distributed.pipelining.Schedule1F1B",
    "why": "stages step their optimizers with weights of different ages, which trains another model than the one given",
}

AMPnetPipe = redirected("experimental.nn.ampnet_pipe.pipe.AMPnetPipe", **_MOVED)
