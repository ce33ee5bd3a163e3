"""fairscale.nn.checkpoint.checkpoint_utils."""

from shardkit.checkpoint_activations import patch_batchnorm

__all__ = ["patch_batchnorm"]
