"""The path of :mod:`shardkit.internal.reduce_scatter_bucketer` up to fairscale 0.4.6."""

from shardkit.internal.reduce_scatter_bucketer import (
    Bucket,
    ReduceScatterBucketer,
    enable_nccl_base_collectives,
)

__all__ = [
    "Bucket",
    "ReduceScatterBucketer",
    "enable_nccl_base_collectives",
]
