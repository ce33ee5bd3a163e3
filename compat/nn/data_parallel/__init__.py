"""fairscale.nn.data_parallel."""

from .fully_sharded_data_parallel import FullyShardedDataParallel, auto_wrap_bn, get_fsdp_instances
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
