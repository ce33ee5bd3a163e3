"""fairscale.experimental.nn.data_parallel.gossip.mixing_manager."""

from shardkit.extra.gossip.mixing import MixingManager, UniformMixing

from .graph_manager import GraphManager

__all__ = ["GraphManager", "MixingManager", "UniformMixing"]
