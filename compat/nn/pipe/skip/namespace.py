"""fairscale.nn.pipe.skip.namespace."""

from shardkit.pipeline.skip import Namespace

__all__ = ["Namespace"]
