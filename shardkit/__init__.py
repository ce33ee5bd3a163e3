"""shardkit: sharded optimizers, gradients and parameters for PyTorch on CPU, GPU and TPU.

This is the clean API. ``shardkit.nn``, ``shardkit.optim``, ``shardkit.utils`` mirror fairscale's import paths.

Each name is loaded when it is first asked for: ``shardkit --help`` and ``import shardkit`` don't wait for torch.
"""

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from .compat import redirected
from .version import __version_tuple__

if TYPE_CHECKING:  # the same names as in the tables below; tests/test_packaging.py compares them
    from .training.adascale import AdaScale as AdaScale
    from .checkpoint.files.loading import (
        load as load,
        load_with_or_without_prefix as load_with_or_without_prefix,
        with_prefix as with_prefix,
        without_prefix as without_prefix,
    )
    from .training.data import GlobalBatchSampler as GlobalBatchSampler, ResumableLoader as ResumableLoader
    from .errors import (
        BackendError as BackendError,
        CheckpointError as CheckpointError,
        ConfigurationError as ConfigurationError,
        DamagedFileError as DamagedFileError,
        FileNotWrittenError as FileNotWrittenError,
        LifecycleError as LifecycleError,
        OutOfStepError as OutOfStepError,
        RankFailedError as RankFailedError,
        RankLostError as RankLostError,
        RankMismatchError as RankMismatchError,
        ShardkitError as ShardkitError,
        UntrustedFileError as UntrustedFileError,
    )
    from .training.evaluation import EvaluationSampler as EvaluationSampler, mean_loss as mean_loss
    from .training.evaluation import gather as gather, gather_tensors as gather_tensors, in_step as in_step
    from .training.data import microbatch as microbatch
    from .fsdp import (
        FSDP as FSDP,
        Change as Change,
        SentWeights as SentWeights,
        fully_shard as fully_shard,
        hybrid_groups as hybrid_groups,
        register_fsdp_forward_method as register_fsdp_forward_method,
        sharding_of as sharding_of,
        step_in_backward as step_in_backward,
    )
    from .training.grad_scaler import GradScaler as GradScaler, ShardedGradScaler as ShardedGradScaler
    from .launching import launch as launch
    from .optimizers.elementwise import declare_elementwise as declare_elementwise
    from .oss.optimizer import OSS as OSS
    from .training.out_of_memory import SkipOutOfMemory as SkipOutOfMemory
    from .policy import (
        Compression as Compression,
        OffloadPolicy as OffloadPolicy,
        PrecisionPolicy as PrecisionPolicy,
        ReducePolicy as ReducePolicy,
        ReshardPolicy as ReshardPolicy,
    )
    from .launching.stopping import stop_requested as stop_requested
    from .oss.sharded_ddp import ShardedDDP as ShardedDDP
    from .tools.summaries import summary as summary
    from .tracing.metrics import Metrics as Metrics
    from .tracing.ranges import span as span
    from .tracing.tracer import trace as trace
    from .checkpoint.format.folders import latest as latest
    from .checkpoint.restoring import (
        Restored as Restored,
        restore as restore,
        restore_training as restore_training,
    )
    from .checkpoint.saving import save as save, save_training as save_training
    from .checkpoint.weights import save_weights as save_weights
    from .training.whole_parameters.optimizer import WholeParameters as WholeParameters
    from .training.uneven import uneven as uneven
    from .wrapping.context import auto_wrap as auto_wrap, enable_wrap as enable_wrap, wrap as wrap

__version__ = ".".join(map(str, __version_tuple__))

# What a training script needs, by home: dir() and ``*`` have these.
_LISTED = {
    "checkpoint.restoring": "restore_training",
    "checkpoint.saving": "save_training",
    "errors": "ShardkitError",
    "fsdp": "FSDP SentWeights fully_shard sharding_of step_in_backward",
    "launching": "launch",
    "launching.stopping": "stop_requested",
    "oss.optimizer": "OSS",
    "oss.sharded_ddp": "ShardedDDP",
    "policy": "OffloadPolicy PrecisionPolicy ReducePolicy ReshardPolicy",
    "tools.summaries": "summary",
    "tracing.metrics": "Metrics",
    "tracing.tracer": "trace",
    "training.data": "ResumableLoader microbatch",
    "training.evaluation": "mean_loss",
    "training.grad_scaler": "GradScaler ShardedGradScaler",
    "training.out_of_memory": "SkipOutOfMemory",
    "training.uneven": "uneven",
    "training.whole_parameters.optimizer": "WholeParameters",
    "wrapping.context": "auto_wrap enable_wrap wrap",
}
# What can be imported from here as well.
_UNLISTED = {
    "checkpoint.files.loading": "load load_with_or_without_prefix with_prefix without_prefix",
    "checkpoint.format.folders": "latest",
    "checkpoint.restoring": "Restored restore",
    "checkpoint.saving": "save",
    "checkpoint.weights": "save_weights",
    "errors": "BackendError CheckpointError ConfigurationError DamagedFileError FileNotWrittenError LifecycleError "
    "OutOfStepError RankFailedError RankLostError RankMismatchError UntrustedFileError",
    "fsdp": "Change hybrid_groups register_fsdp_forward_method",
    "optimizers.elementwise": "declare_elementwise",
    "policy": "Compression",
    "tracing.ranges": "span",
    "training.adascale": "AdaScale",
    "training.data": "GlobalBatchSampler",
    "training.evaluation": "EvaluationSampler gather gather_tensors in_step",
}
_HOME_OF = {n: home for homes in (_LISTED, _UNLISTED) for home, names in homes.items() for n in names.split()}
__all__ = sorted(name for names in _LISTED.values() for name in names.split())

redirected.serve()


def __getattr__(name: str) -> Any:
    """Loads a public name; or a module, as ``shardkit.pipeline``, or ``shardkit.nn`` as with fairscale."""
    home = _HOME_OF.get(name)
    if home is not None:
        value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    elif not name.startswith("_") and importlib.util.find_spec(f"{__name__}.{name}") is not None:
        value = importlib.import_module(f"{__name__}.{name}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
