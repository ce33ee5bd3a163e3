"""fairscale.experimental.nn.auto_shard."""

from shardkit.extra.auto_shard import shard_model

__all__ = ["shard_model"]
