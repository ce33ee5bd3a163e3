"""fairscale.nn.pipe.copy. Copies between streams."""

from shardkit.nn.pipe.stream import current_stream, get_device, record_stream, use_stream, wait_stream
from shardkit.nn.pipe.types import Tensors
from shardkit.redirected import redirected

__all__ = [
    "Context",
    "Copy",
    "Tensors",
    "Wait",
    "current_stream",
    "get_device",
    "record_stream",
    "use_stream",
    "wait_stream",
]

_MOVED = {
    "instead": "torch.Tensor.to(device, non_blocking=True)",
    "why": "torch orders copies between devices, in backward too",
}

Context = redirected("nn.pipe.copy.Context", **_MOVED)
Copy = redirected("nn.pipe.copy.Copy", **_MOVED)
Wait = redirected("nn.pipe.copy.Wait", **_MOVED)
