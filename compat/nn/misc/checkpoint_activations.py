"""The path of fairscale.nn.checkpoint.checkpoint_activations up to fairscale 0.3.6."""

from ..checkpoint.checkpoint_activations import (
    CheckpointFunction,
    checkpoint_wrapper,
    disable_checkpointing,
    enable_checkpointing,
    enable_recomputing,
    is_checkpointing,
    is_recomputing,
    patch_batchnorm,
)

__all__ = [
    "CheckpointFunction",
    "checkpoint_wrapper",
    "disable_checkpointing",
    "enable_checkpointing",
    "enable_recomputing",
    "is_checkpointing",
    "is_recomputing",
    "patch_batchnorm",
]
