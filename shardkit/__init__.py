"""shardkit: sharded optimizers, gradients and parameters for PyTorch on CPU, GPU and TPU.

This is the clean API. ``shardkit.nn``, ``shardkit.optim``, ``shardkit.utils`` mirror fairscale's import paths.
"""

import importlib
from typing import Any

from . import compat, redirected
from .adascale.optimizer import AdaScale
from .checkpoint.loading import load
from .checkpoint.prefix import load_with_or_without_prefix, with_prefix, without_prefix
from .data import GlobalBatchSampler, ResumableLoader
from .errors import (
    BackendError,
    CheckpointError,
    ConfigurationError,
    DamagedFileError,
    FileNotWrittenError,
    LifecycleError,
    OutOfStepError,
    RankFailedError,
    RankLostError,
    RankMismatchError,
    ShardkitError,
    UntrustedFileError,
)
from .evaluation.gathering import gather, gather_tensors
from .evaluation.sampling import EvaluationSampler, in_step
from .fsdp import FSDP, fully_shard, hybrid_groups, register_fsdp_forward_method, sharding_of
from .grad_scaler import GradScaler, ShardedGradScaler
from .launch import launch
from .optimizers.elementwise import declare_elementwise
from .oss.optimizer import OSS
from .out_of_memory.skipping import SkipOutOfMemory
from .policy import Compression, OffloadPolicy, PrecisionPolicy, ReducePolicy, ReshardPolicy
from .running.stopping import stop_requested
from .sharded_ddp.wrapper import ShardedDDP
from .summary import summary
from .tracing.metrics import Metrics
from .tracing.ranges import span
from .tracing.tracer import trace
from .training_checkpoints.folders import latest
from .training_checkpoints.restoring import Restored, restore
from .training_checkpoints.saving import save
from .version import __version_tuple__
from .whole_parameters.optimizer import WholeParameters
from .wrapping.context import auto_wrap, enable_wrap, wrap

__version__ = ".".join(map(str, __version_tuple__))

__all__ = [
    "FSDP",
    "OSS",
    "AdaScale",
    "BackendError",
    "CheckpointError",
    "Compression",
    "ConfigurationError",
    "DamagedFileError",
    "EvaluationSampler",
    "FileNotWrittenError",
    "GlobalBatchSampler",
    "GradScaler",
    "LifecycleError",
    "Metrics",
    "OffloadPolicy",
    "OutOfStepError",
    "PrecisionPolicy",
    "RankFailedError",
    "RankLostError",
    "RankMismatchError",
    "ReducePolicy",
    "ReshardPolicy",
    "Restored",
    "ResumableLoader",
    "ShardedDDP",
    "ShardedGradScaler",
    "ShardkitError",
    "SkipOutOfMemory",
    "UntrustedFileError",
    "WholeParameters",
    "auto_wrap",
    "declare_elementwise",
    "enable_wrap",
    "fully_shard",
    "gather",
    "gather_tensors",
    "hybrid_groups",
    "in_step",
    "latest",
    "launch",
    "load",
    "load_with_or_without_prefix",
    "register_fsdp_forward_method",
    "restore",
    "save",
    "sharding_of",
    "span",
    "stop_requested",
    "summary",
    "trace",
    "with_prefix",
    "without_prefix",
    "wrap",
]


redirected.serve()

# What can be used after ``import shardkit`` alone, beside compat's packages; loaded when it is asked for.
_PACKAGES = frozenset({"extra", "moe", "model_parallel", "pipeline"})


def __getattr__(name: str) -> Any:
    """``shardkit.pipeline``, and ``shardkit.nn`` as with fairscale, after ``import shardkit`` alone."""
    if name in _PACKAGES or name in compat.PARTS:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
