"""fairscale.nn.pipe.messages. Messages between stages over RPC or send and receive."""

from shardkit.internal.object import pyobject_to_tensor, tensor_to_pyobject
from shardkit.nn.model_parallel.initialize import get_pipeline_parallel_group
from shardkit.nn.pipe.types import PipeMessage
from shardkit.redirected import redirected, redirected_function, redirected_names

__all__ = [
    "MakeTransport",
    "PipeMessage",
    "RpcTransport",
    "SendRecvTransport",
    "Transport",
    "get_pipeline_parallel_group",
    "pyobject_to_tensor",
    "rpc_push_queue",
    "tensor_to_pyobject",
    "to_input_device",
]

_MOVED = {
    "instead": "shardkit.nn.pipe.AsyncPipe, or torch.distributed.isend and irecv",
    "why": "stages send over their process group",
}

RpcTransport = redirected("nn.pipe.messages.RpcTransport", **_MOVED)
SendRecvTransport = redirected("nn.pipe.messages.SendRecvTransport", **_MOVED)
Transport = redirected("nn.pipe.messages.Transport", **_MOVED)
MakeTransport = redirected_function("nn.pipe.messages.MakeTransport", **_MOVED)
rpc_push_queue = redirected_function("nn.pipe.messages.rpc_push_queue", **_MOVED)
to_input_device = redirected_function("nn.pipe.messages.to_input_device", **_MOVED)

__getattr__ = redirected_names(__name__, ["MESSAGE_TENSOR_SIZE", "MessageQueues"], **_MOVED)
