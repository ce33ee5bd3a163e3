"""Averages with some peers: graphs of nodes, push-sum, and data parallel training made of it."""

from .data_parallel import SlowMoBaseAlgorithm, SlowMoDataParallel, SlowMomentumOptions
from .nodes import Nodes
from .push import GossipOptions

__all__ = ["GossipOptions", "Nodes", "SlowMoBaseAlgorithm", "SlowMoDataParallel", "SlowMomentumOptions"]
