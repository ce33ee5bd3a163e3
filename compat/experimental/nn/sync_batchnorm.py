"""fairscale.experimental.nn.sync_batchnorm."""

from shardkit.activations.checkpointing import is_checkpointing, is_recomputing
from shardkit.extra.batch_norm import SyncBatchNorm
from shardkit.internal.version import torch_version

__all__ = ["SyncBatchNorm", "is_checkpointing", "is_recomputing", "torch_version"]
