"""Pipeline parallelism: partitions of a sequential module on several devices, or on several ranks."""

from .microbatch import BalanceError, DeferredBatchNorm, PipeTypeError, TooFewDevicesError
from .pipe import Pipe
from .skip import Namespace, pop, skippable, stash, verify_skippables

__all__ = [
    "BalanceError",
    "DeferredBatchNorm",
    "Namespace",
    "Pipe",
    "PipeTypeError",
    "TooFewDevicesError",
    "pop",
    "skippable",
    "stash",
    "verify_skippables",
]
