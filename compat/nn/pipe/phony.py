"""fairscale.nn.pipe.phony. Tensors without a value that carried an order through autograd's graph."""

from shardkit.nn.pipe.stream import default_stream, use_stream
from shardkit.redirected import redirected_function

__all__ = [
    "default_stream",
    "get_phony",
    "use_stream",
]

_MOVED = {
    "instead": "shardkit.nn.pipe.Pipe",
    "why": "skip tensors are arguments and results, and autograd takes what is ready latest first",
}

get_phony = redirected_function("nn.pipe.phony.get_phony", **_MOVED)
