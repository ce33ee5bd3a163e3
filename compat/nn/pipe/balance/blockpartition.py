"""fairscale.nn.pipe.balance.blockpartition."""

from shardkit.pipeline.balance import solve

__all__ = ["solve"]
