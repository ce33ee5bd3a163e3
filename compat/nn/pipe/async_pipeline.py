"""fairscale.nn.pipe.async_pipeline. What AsyncPipe ran."""

from shardkit.nn.pipe.async_schedule import AsyncEventLoop, ModuleWrapper
from shardkit.nn.pipe.messages import MakeTransport
from shardkit.nn.pipe.microbatch import Batch
from shardkit.nn.pipe.skip.layout import SkipLayout
from shardkit.nn.pipe.skip.tracker import SkipTrackerThroughPotals
from shardkit.redirected import redirected

__all__ = [
    "AsyncEventLoop",
    "AsyncPipeline",
    "Batch",
    "MakeTransport",
    "ModuleWrapper",
    "SkipLayout",
    "SkipTrackerThroughPotals",
]

_MOVED = {
    "instead": "shardkit.nn.pipe.AsyncPipe, or torch.distributed.pipelining",
    "why": "it is a part of AsyncPipe",
}

AsyncPipeline = redirected("nn.pipe.async_pipeline.AsyncPipeline", **_MOVED)
