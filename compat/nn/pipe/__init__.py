"""fairscale.nn.pipe: pipeline parallelism."""

from shardkit.pipeline.async_pipe import PipeRPCWrapper

from .async_pipe import AsyncPipe
from .checkpoint import is_checkpointing, is_recomputing
from .pipe import Pipe
from .types import LazyModule

__all__ = ["AsyncPipe", "LazyModule", "Pipe", "PipeRPCWrapper", "is_checkpointing", "is_recomputing"]
