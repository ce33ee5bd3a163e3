"""torch.distributed.fsdp's FSDP1 interface on shardkit's FSDP: a script changes the import, and nothing else.

::

    from shardkit.torch_fsdp import FullyShardedDataParallel as FSDP, MixedPrecision, ShardingStrategy
    from shardkit.torch_fsdp.wrap import transformer_auto_wrap_policy

or none: after :func:`install` torch's FullyShardedDataParallel is shardkit's in this process.

Enums, configurations and wrap policies are torch's own classes, so that objects made by either import work.
"""

from torch.distributed.checkpoint import state_dict as torchs_state_dict
from torch.distributed.fsdp import fully_sharded_data_parallel as torchs
from torch.distributed.fsdp import sharded_grad_scaler as torchs_scaler

from . import api, fully_sharded_data_parallel, sharded_grad_scaler, state_dict, wrap
from .api import *  # noqa: F403
from .fsdp2 import Served
from .fully_sharded_data_parallel import FullyShardedDataParallel, OptimStateKeyType

__all__ = [*api.__all__, "FullyShardedDataParallel", "OptimStateKeyType"]

_modules = {
    torchs: fully_sharded_data_parallel,
    torchs_scaler: sharded_grad_scaler,
    torchs_state_dict: state_dict,
}
_served = Served("shardkit.torch_fsdp", 1, _modules)
install, uninstall, is_installed = _served.install, _served.uninstall, _served.is_installed
