"""fairscale.internal.reduce_scatter_bucketer."""

import os

from shardkit.redirected import redirected_names

__getattr__ = redirected_names(__name__)


# Read by code of fairscale's time. Nothing depends on it here: every backend has the collective on one buffer.
enable_nccl_base_collectives = os.getenv("ENABLE_NCCL_BASE_COLLECTIVES", "1") != "0"
