"""fairscale.experimental.nn."""

from shardkit.experimental.nn.mevo import BaselineSoftmaxNllLoss
from shardkit.experimental.nn.mevo import MemoryEfficientVocabOutput as MEVO
from shardkit.experimental.nn.offload import OffloadModel
from shardkit.experimental.nn.sync_batchnorm import SyncBatchNorm

__all__ = ["MEVO", "BaselineSoftmaxNllLoss", "OffloadModel", "SyncBatchNorm"]
