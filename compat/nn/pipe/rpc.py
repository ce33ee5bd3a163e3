"""fairscale.nn.pipe.rpc."""

from shardkit.nn.model_parallel.initialize import get_pipeline_parallel_group
from shardkit.pipeline.remote_pipe import PipeRPCWrapper
from shardkit.redirected import redirected_names

from .async_pipe import AsyncPipe
from .types import PipeMessage, TensorOrTensors

__all__ = [
    "AsyncPipe",
    "PipeBackRedirect",
    "PipeMessage",
    "PipeRPCWrapper",
    "TensorOrTensors",
    "callback_with_model",
    "get_dtype",
    "get_global_ranks_from_group",
    "get_pipeline_parallel_group",
    "get_shapes",
    "set_device_based_on_group",
]

__getattr__ = redirected_names(__name__)
