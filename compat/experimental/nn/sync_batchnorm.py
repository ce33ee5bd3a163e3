"""fairscale.experimental.nn.sync_batchnorm."""

from shardkit.checkpoint_activations import is_checkpointing, is_recomputing
from shardkit.internal.version import torch_version
from shardkit.sync_batch_norm import SyncBatchNorm

__all__ = ["SyncBatchNorm", "is_checkpointing", "is_recomputing", "torch_version"]
