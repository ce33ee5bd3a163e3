"""fairscale.experimental.nn.data_parallel.gossip.gossiper."""

import enum

from shardkit.extra.gossip.gossiper import Gossiper, PushPull, PushSum

from .graph_manager import GraphManager
from .mixing_manager import MixingManager, UniformMixing

__all__ = [
    "Gossiper",
    "GraphManager",
    "MixingManager",
    "PushPull",
    "PushSum",
    "UniformMixing",
    "dist_backend",
]


class dist_backend(str, enum.Enum):
    """Names of torch.distributed's backends."""

    UNDEFINED = "undefined"
    TCP = "tcp"
    MPI = "mpi"
    GLOO = "gloo"
    NCCL = "nccl"
