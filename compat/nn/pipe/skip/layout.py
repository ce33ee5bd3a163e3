"""fairscale.nn.pipe.skip.layout. Which partition stashes for which."""

from shardkit.nn.pipe.skip.namespace import Namespace
from shardkit.redirected import redirected, redirected_function

__all__ = [
    "Namespace",
    "SkipLayout",
    "inspect_skip_layout",
]

_MOVED = {
    "instead": "shardkit.nn.pipe.skip.verify_skippables",
    "why": "a skip tensor is sent where a partition pops it",
}

SkipLayout = redirected("nn.pipe.skip.layout.SkipLayout", **_MOVED)
inspect_skip_layout = redirected_function("nn.pipe.skip.layout.inspect_skip_layout", **_MOVED)
