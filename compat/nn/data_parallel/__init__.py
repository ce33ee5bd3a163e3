"""fairscale.nn.data_parallel."""

from shardkit.compat.redirected import redirected_names

from .fully_sharded_data_parallel import (
    FullyShardedDataParallel,
    OffloadConfig,
    TrainingState,
    auto_wrap_bn,
    get_fsdp_instances,
    no_pre_load_state_dict_hook,
)
from .sharded_ddp import ShardedDataParallel

__all__ = [
    "FullyShardedDataParallel",
    "OffloadConfig",
    "ShardedDataParallel",
    "TrainingState",
    "auto_wrap_bn",
    "get_fsdp_instances",
    "no_pre_load_state_dict_hook",
]

__getattr__ = redirected_names(__name__)
