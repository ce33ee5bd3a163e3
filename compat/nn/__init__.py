"""fairscale.nn."""

# The module first: its name is then taken by the function, and `from shardkit.nn.auto_wrap import ...` works too.
from . import auto_wrap as _auto_wrap  # type: ignore[import-not-found]  # isort: skip

from .checkpoint import checkpoint_wrapper
from .data_parallel import FullyShardedDataParallel, ShardedDataParallel
from .misc import FlattenParamsWrapper
from .moe import MOELayer, Top2Gate
from .pipe import Pipe, PipeRPCWrapper
from .wrap import auto_wrap, config_auto_wrap_policy, default_auto_wrap_policy, enable_wrap, wrap

__all__ = [
    "FlattenParamsWrapper",
    "FullyShardedDataParallel",
    "MOELayer",
    "Pipe",
    "PipeRPCWrapper",
    "ShardedDataParallel",
    "Top2Gate",
    "auto_wrap",
    "checkpoint_wrapper",
    "config_auto_wrap_policy",
    "default_auto_wrap_policy",
    "enable_wrap",
    "wrap",
]
