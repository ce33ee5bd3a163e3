"""fairscale.experimental.nn.data_parallel.gossip: LocalSGD, stochastic gradient push, slow momentum."""

from shardkit.compat.redirected import redirected_names

from .data_parallel import GossipOptions as GossipOptions
from .data_parallel import Nodes as Nodes
from .data_parallel import SlowMoBaseAlgorithm as SlowMoBaseAlgorithm
from .data_parallel import SlowMoDataParallel as SlowMoDataParallel
from .data_parallel import SlowMomentumOptions as SlowMomentumOptions
from .distributed import SlowMoDistributedDataParallel as SlowMoDistributedDataParallel

__getattr__ = redirected_names(__name__)
