"""fairscale.internal.reduce_scatter_bucketer."""

import os

from shardkit.extra.reduce_scatter_bucketer import Bucket, ReduceScatterBucketer

__all__ = ["Bucket", "ReduceScatterBucketer", "enable_nccl_base_collectives"]

# Read by code of fairscale's time. Nothing depends on it here: every backend has the collective on one buffer.
enable_nccl_base_collectives = os.getenv("ENABLE_NCCL_BASE_COLLECTIVES", "1") != "0"
