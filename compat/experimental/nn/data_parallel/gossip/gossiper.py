"""fairscale.experimental.nn.data_parallel.gossip.gossiper."""

import enum

from shardkit.redirected import redirected_names

__getattr__ = redirected_names(__name__)


class dist_backend(str, enum.Enum):
    """Names of torch.distributed's backends."""

    UNDEFINED = "undefined"
    TCP = "tcp"
    MPI = "mpi"
    GLOO = "gloo"
    NCCL = "nccl"
