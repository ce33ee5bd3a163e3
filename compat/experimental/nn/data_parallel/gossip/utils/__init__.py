"""fairscale.experimental.nn.data_parallel.gossip.utils."""

from shardkit.compat.redirected import redirected_names

__getattr__ = redirected_names(__name__)
