"""Pipeline parallelism: partitions of a sequential module on several devices, or on several ranks."""

from .pipe import (
    BalanceError,
    DeferredBatchNorm,
    Namespace,
    Pipe,
    PipeTypeError,
    TooFewDevicesError,
    pop,
    skippable,
    stash,
    verify_skippables,
)

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
