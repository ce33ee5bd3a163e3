"""fairscale.experimental.nn."""

from shardkit.extra.batch_norm import SyncBatchNorm
from shardkit.extra.offload import OffloadModel
from shardkit.extra.vocab_output import BaselineSoftmaxNllLoss
from shardkit.extra.vocab_output import MemoryEfficientVocabOutput as MEVO

__all__ = ["MEVO", "BaselineSoftmaxNllLoss", "OffloadModel", "SyncBatchNorm"]
