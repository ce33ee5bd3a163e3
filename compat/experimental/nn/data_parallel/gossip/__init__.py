"""fairscale.experimental.nn.data_parallel.gossip: LocalSGD, stochastic gradient push, slow momentum."""

from shardkit.redirected import redirected_names

from .distributed import SlowMoDistributedDataParallel as SlowMoDistributedDataParallel

__getattr__ = redirected_names(__name__)
