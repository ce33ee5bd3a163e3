"""The path of :mod:`shardkit.internal.parallel` up to fairscale 0.4.6."""

from shardkit.internal.parallel import (
    ProcessGroupName,
    chunk_and_pad,
    enable_pytorch_sync_bn,
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
