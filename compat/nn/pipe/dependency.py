"""fairscale.nn.pipe.dependency. Edges that carried an order through autograd's graph."""

from shardkit.nn.pipe.phony import get_phony
from shardkit.redirected import redirected, redirected_function

__all__ = [
    "Fork",
    "Join",
    "fork",
    "get_phony",
    "join",
]

_MOVED = {
    "instead": "shardkit.nn.pipe.Pipe",
    "why": "autograd takes what is ready latest first, which is the order of backward",
}

Fork = redirected("nn.pipe.dependency.Fork", **_MOVED)
Join = redirected("nn.pipe.dependency.Join", **_MOVED)
fork = redirected_function("nn.pipe.dependency.fork", **_MOVED)
join = redirected_function("nn.pipe.dependency.join", **_MOVED)
