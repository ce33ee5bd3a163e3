"""fairscale.experimental.nn.data_parallel.gossip.graph_manager."""

from shardkit.extra.gossip.graphs import (
    DynamicBipartiteExponentialGraph,
    DynamicBipartiteLinearGraph,
    DynamicDirectedExponentialGraph,
    DynamicDirectedLinearGraph,
    Edge,
    GraphManager,
    NPeerDynamicDirectedExponentialGraph,
    RingGraph,
)

__all__ = [
    "DynamicBipartiteExponentialGraph",
    "DynamicBipartiteLinearGraph",
    "DynamicDirectedExponentialGraph",
    "DynamicDirectedLinearGraph",
    "Edge",
    "GraphManager",
    "NPeerDynamicDirectedExponentialGraph",
    "RingGraph",
]
