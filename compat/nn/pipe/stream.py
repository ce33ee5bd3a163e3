"""fairscale.nn.pipe.stream. Streams of CUDA devices, or stand-ins on a CPU."""

from shardkit.redirected import redirected, redirected_function, redirected_names

__all__ = [
    "CPUStreamType",
    "as_cuda",
    "current_stream",
    "default_stream",
    "get_device",
    "is_cuda",
    "new_stream",
    "record_stream",
    "use_device",
    "use_stream",
    "wait_stream",
]

_MOVED = {
    "instead": "torch.Stream and torch.accelerator",
    "why": "torch has streams that don't name the device",
}

CPUStreamType = redirected("nn.pipe.stream.CPUStreamType", **_MOVED)
as_cuda = redirected_function("nn.pipe.stream.as_cuda", **_MOVED)
current_stream = redirected_function("nn.pipe.stream.current_stream", **_MOVED)
default_stream = redirected_function("nn.pipe.stream.default_stream", **_MOVED)
get_device = redirected_function("nn.pipe.stream.get_device", **_MOVED)
is_cuda = redirected_function("nn.pipe.stream.is_cuda", **_MOVED)
new_stream = redirected_function("nn.pipe.stream.new_stream", **_MOVED)
record_stream = redirected_function("nn.pipe.stream.record_stream", **_MOVED)
use_device = redirected_function("nn.pipe.stream.use_device", **_MOVED)
use_stream = redirected_function("nn.pipe.stream.use_stream", **_MOVED)
wait_stream = redirected_function("nn.pipe.stream.wait_stream", **_MOVED)

__getattr__ = redirected_names(__name__, ["AbstractStream", "CPUStream"], **_MOVED)
