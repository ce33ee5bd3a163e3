"""shardkit: sharded optimizers, gradients and parameters for PyTorch on CPU, GPU and TPU.

This is the clean API. ``shardkit.nn``, ``shardkit.optim``, ``shardkit.utils`` mirror fairscale's import paths.
"""

from .errors import (
    BackendError,
    ConfigurationError,
    LifecycleError,
    OutOfStepError,
    RankFailedError,
    RankLostError,
    RankMismatchError,
    ShardkitError,
)
from .grad_scaler import GradScaler, ShardedGradScaler
from .launch import launch
from .oss import OSS
from .policy import ReducePolicy
from .sharded_ddp import ShardedDDP
from .wrapping import auto_wrap, enable_wrap, wrap

__version__ = "0.1.0"

__all__ = [
    "OSS",
    "BackendError",
    "ConfigurationError",
    "GradScaler",
    "LifecycleError",
    "OutOfStepError",
    "RankFailedError",
    "RankLostError",
    "RankMismatchError",
    "ReducePolicy",
    "ShardedDDP",
    "ShardedGradScaler",
    "ShardkitError",
    "auto_wrap",
    "enable_wrap",
    "launch",
    "wrap",
]
