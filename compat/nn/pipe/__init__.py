"""fairscale.nn.pipe: pipeline parallelism."""

from shardkit.pipeline.async_pipe import AsyncPipe, LazyModule, PipeRPCWrapper
from shardkit.pipeline.pipe import Pipe
from shardkit.wrapping.activations import is_checkpointing, is_recomputing

__all__ = ["AsyncPipe", "LazyModule", "Pipe", "PipeRPCWrapper", "is_checkpointing", "is_recomputing"]
