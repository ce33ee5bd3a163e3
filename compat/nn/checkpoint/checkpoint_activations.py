"""fairscale.nn.checkpoint.checkpoint_activations."""

from __future__ import annotations

from typing import Any

from torch import nn

from shardkit import checkpoint_activations as _core
from shardkit.checkpoint_activations import (
    CheckpointFunction,
    ThreadLocalCheckpointingState,
    disable_checkpointing,
    enable_checkpointing,
    enable_recomputing,
    is_checkpointing,
    is_recomputing,
    thread_local,
)

from .checkpoint_utils import patch_batchnorm

__all__ = [
    "CheckpointFunction",
    "ThreadLocalCheckpointingState",
    "checkpoint_wrapper",
    "disable_checkpointing",
    "enable_checkpointing",
    "enable_recomputing",
    "is_checkpointing",
    "is_recomputing",
    "patch_batchnorm",
    "thread_local",
]


def checkpoint_wrapper(
    module: nn.Module, offload_to_cpu: bool = False, maintain_forward_counter: Any = None
) -> nn.Module:
    """As :func:`shardkit.checkpoint_activations.checkpoint_wrapper`.

    Args:
        module: changed in place.
        offload_to_cpu: keep the inputs in host memory.
        maintain_forward_counter: ignored; fairscale had it up to 0.4.0.
    """
    return _core.checkpoint_wrapper(module, offload_to_cpu)
