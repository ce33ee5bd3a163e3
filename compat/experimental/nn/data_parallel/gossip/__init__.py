"""fairscale.experimental.nn.data_parallel.gossip: LocalSGD, stochastic gradient push, slow momentum."""

from .distributed import GossipOptions as GossipOptions
from .distributed import Nodes as Nodes
from .distributed import SlowMoBaseAlgorithm as SlowMoBaseAlgorithm
from .distributed import SlowMoDataParallel as SlowMoDataParallel
from .distributed import SlowMoDistributedDataParallel as SlowMoDistributedDataParallel
from .distributed import SlowMomentumOptions as SlowMomentumOptions
