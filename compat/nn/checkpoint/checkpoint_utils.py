"""fairscale.nn.checkpoint.checkpoint_utils."""

from shardkit.activations.checkpointing import patch_batchnorm

__all__ = ["patch_batchnorm"]
