"""fairscale.experimental.nn."""

from .mevo import BaselineSoftmaxNllLoss
from .mevo import MemoryEfficientVocabOutput as MEVO
from .offload import OffloadModel
from .sync_batchnorm import SyncBatchNorm

__all__ = ["MEVO", "BaselineSoftmaxNllLoss", "OffloadModel", "SyncBatchNorm"]
