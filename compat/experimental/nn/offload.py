"""fairscale.experimental.nn.offload."""

from shardkit.extra.offload import ModelShard, OffloadFunction, OffloadModel, ShardSyncLayer
from shardkit.extra.offload import split_layers as _split  # noqa: F401  # fairscale's name

__all__ = ["ModelShard", "OffloadFunction", "OffloadModel", "ShardSyncLayer"]
