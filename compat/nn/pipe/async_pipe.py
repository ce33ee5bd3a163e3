"""fairscale.nn.pipe.async_pipe."""

from __future__ import annotations

from torch import nn

from shardkit.nn.model_parallel.initialize import get_pipeline_parallel_group
from shardkit.pipeline import partition
from shardkit.pipeline.async_pipe import AsyncPipe
from shardkit.pipeline.pipe import MOVING_DENIED
from shardkit.redirected import redirected_names

from . import microbatch
from .batchnorm import DeferredBatchNorm
from .skip.skippable import Skippable
from .types import LazyModule, TensorOrTensors, Tensors

__all__ = [
    "MOVING_DENIED",
    "AsyncPipe",
    "AsyncPipeline",
    "DeferredBatchNorm",
    "Invocation",
    "LazyModule",
    "Location",
    "ModuleWrapper",
    "PartitionInfo",
    "SkipLayout",
    "Skippable",
    "TensorOrTensors",
    "Tensors",
    "check_balance",
    "get_pipeline_parallel_group",
    "microbatch",
    "verify_module",
]

__getattr__ = redirected_names(__name__)


def check_balance(module: nn.Sequential | list[LazyModule], balance: list[int]) -> None:
    """Raises BalanceError (a ValueError) for numbers of layers that don't fit."""
    partition.check_balance(len(module), balance, len(balance), "ranks")


def verify_module(module: nn.Sequential | list[LazyModule]) -> None:
    """Raises ConfigurationError (a ValueError) for a layer that is there twice."""
    partition.verify_distinct(module)
