"""fairscale.nn.pipe.rpc."""

from shardkit.nn.model_parallel.initialize import get_pipeline_parallel_group
from shardkit.pipeline.remote_pipe import PipeRPCWrapper
from shardkit.redirected import redirected, redirected_function, redirected_names

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

_MOVED = {"instead": "shardkit.nn.pipe.PipeRPCWrapper", "why": "it is a part of it"}
PipeBackRedirect = redirected("nn.pipe.rpc.PipeBackRedirect", **_MOVED)
callback_with_model = redirected_function("nn.pipe.rpc.callback_with_model", **_MOVED)
get_dtype = redirected_function("nn.pipe.rpc.get_dtype", **_MOVED)
get_shapes = redirected_function("nn.pipe.rpc.get_shapes", **_MOVED)
set_device_based_on_group = redirected_function("nn.pipe.rpc.set_device_based_on_group", **_MOVED)
get_global_ranks_from_group = redirected_function(
    "nn.pipe.rpc.get_global_ranks_from_group",
    instead="torch.distributed.get_process_group_ranks",
    why="torch has it",
)

__getattr__ = redirected_names(
    __name__,
    ["DEFAULT_MAX_SOURCE_POSITIONS", "DEFAULT_MAX_TARGET_POSITIONS", "DtypeOrDtypes", "SizeOrSizes"],
    **_MOVED,
)
