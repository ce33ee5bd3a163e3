"""fairscale.experimental.nn.data_parallel.gossip: LocalSGD, stochastic gradient push, slow momentum."""

from shardkit.compat.redirected import redirected_names

from .distributed import GossipOptions as GossipOptions
from .distributed import Nodes as Nodes
from .distributed import SlowMoBaseAlgorithm as SlowMoBaseAlgorithm
from .distributed import SlowMoDataParallel as SlowMoDataParallel
from .distributed import SlowMoDistributedDataParallel as SlowMoDistributedDataParallel
from .distributed import SlowMomentumOptions as SlowMomentumOptions

__getattr__ = redirected_names(__name__)
