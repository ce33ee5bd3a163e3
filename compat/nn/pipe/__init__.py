"""fairscale.nn.pipe: pipeline parallelism."""

from .async_pipe import AsyncPipe
from .checkpoint import is_checkpointing, is_recomputing
from .pipe import Pipe
from .rpc import PipeRPCWrapper
from .types import LazyModule

__all__ = ["AsyncPipe", "LazyModule", "Pipe", "PipeRPCWrapper", "is_checkpointing", "is_recomputing"]
