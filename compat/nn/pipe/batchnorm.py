"""fairscale.nn.pipe.batchnorm."""

from shardkit.pipeline.batch_norm import DeferredBatchNorm, TModule

from .checkpoint import is_recomputing

__all__ = ["DeferredBatchNorm", "TModule", "is_recomputing"]
