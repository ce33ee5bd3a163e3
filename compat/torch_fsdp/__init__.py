"""torch.distributed.fsdp's FSDP1 interface on shardkit's FSDP: a script changes the import, and nothing else.

::

    from shardkit.torch_fsdp import FullyShardedDataParallel as FSDP, MixedPrecision, ShardingStrategy
    from shardkit.torch_fsdp.wrap import transformer_auto_wrap_policy

Enums, configurations and wrap policies are torch's own classes, so that objects made by either import work.
"""

from . import api, sharded_grad_scaler, wrap
from .api import *  # noqa: F403
from .fully_sharded_data_parallel import FullyShardedDataParallel, OptimStateKeyType

__all__ = [*api.__all__, "FullyShardedDataParallel", "OptimStateKeyType"]
