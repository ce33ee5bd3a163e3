"""fairscale.nn.data_parallel."""

from .sharded_ddp import ShardedDataParallel

__all__ = ["ShardedDataParallel"]
