"""fairscale.internal.parallel."""

from torch import nn

from shardkit.extra.process_groups import (
    ProcessGroupName,
    chunk_and_pad,
    get_process_group_cached,
    validate_process_group,
)

__all__ = [
    "ProcessGroupName",
    "chunk_and_pad",
    "enable_pytorch_sync_bn",
    "get_process_group_cached",
    "validate_process_group",
]


def enable_pytorch_sync_bn(module: nn.Module) -> None:
    """Older torch needed to be told of SyncBatchNorm's device count; today's does not: nothing to do."""
