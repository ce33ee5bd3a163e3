"""fairscale.experimental.nn.data_parallel.gossip.distributed: SlowMoDistributedDataParallel."""

from __future__ import annotations

import logging

import torch
from torch import nn

from shardkit.compat.redirected import redirected_names
from shardkit.errors import ConfigurationError
from shardkit.types import ProcessGroup

from .data_parallel import GossipOptions, Nodes, SlowMoBaseAlgorithm, SlowMoDataParallel, SlowMomentumOptions
from .graph_manager import GraphManager, MixingManager
from .utils import MultiProcessAdapter

__getattr__ = redirected_names(__name__)


HEARTBEAT_TIMEOUT = 300  # fairscale's; the group's own timeout counts here
BROADCAST_BUCKET_SIZE = 10 * 1024 * 1024


class SlowMoDistributedDataParallel(SlowMoDataParallel):
    """Data parallel training in which nodes step on their own and agree from time to time.

    After each ``optimizer.step()`` comes ``model.perform_slowmo(optimizer)``. The ranks of a node share gradients in
    every backward. LocalSGD averages nodes every ``localsgd_frequency`` steps; SGP (stochastic gradient push) averages
    with some peers in every step. Slow momentum is :class:`.data_parallel.SlowMomentum`.

    Where it departs from fairscale's:

    * Rank 0's parameters are taken at the start, and slow momentum starts from them. fairscale starts from what each
      rank has after its first step, and ranks never come together again without ``slowmo_memory_efficient``.
    * LocalSGD averages before every slow momentum step (fairscale: only where ``slowmo_frequency`` is a multiple of
      ``localsgd_frequency``, or with ``slowmo_memory_efficient``).
    * With ``fp32_params``, those are averaged, not the fp16 ones with a correction of their errors.
    * Weights of push-sum are 1 again after a full average.

    Args:
        nprocs_per_node: how many ranks, next to each other, make a node.
        broadcast_buffers: take rank 0's buffers after training forwards.
        slowmo_base_algorithm: LOCALSGD or SGP.
        slowmo_momentum, slowmo_lr: β and α; with 0 and 1 there is no slow momentum.
        slowmo_memory_efficient: its state is sharded over ranks, and its step averages all of them.
        slowmo_frequency: steps from one slow momentum step to the next.
        slowmo_num_shards: over how many ranks at most the state is sharded.
        localsgd_frequency: steps from one average to the next.
        graph, mixing: (SGP) with whom to gossip, and how much; default: each step one peer, 1, 2, 4, ... nodes ahead.
        push_sum: (SGP) PushSum or PushPull, which are the same here.
        slowmo_sgp_average_params: (SGP) average all nodes before slow momentum.
        overlap, synch_freq, use_streams: refused or ignored; gossip does not overlap (neither does fairscale's).
        verbose: log at level DEBUG.
        profile_mode: refused; use torch.profiler.
        process_rank, process_world_size: must be those of the group, if given.
        global_group, master_group, local_node_group: all ranks, the first ranks of nodes, and the ranks of this node.
        comm_device: ignored: communication goes from where the parameters are.

    Raises:
        ConfigurationError: nodes of uneven size, options that don't fit.
    """

    def __init__(
        self,
        module: nn.Module,
        nprocs_per_node: int,
        broadcast_buffers: bool = True,
        slowmo_base_algorithm: SlowMoBaseAlgorithm = SlowMoBaseAlgorithm.LOCALSGD,
        slowmo_momentum: float = 0.5,
        slowmo_memory_efficient: bool = True,
        slowmo_frequency: int = 48,
        slowmo_lr: float = 1.0,
        slowmo_num_shards: int = 32,
        localsgd_frequency: int = 3,
        graph: GraphManager | None = None,
        mixing: MixingManager | None = None,
        push_sum: bool = True,
        overlap: bool = False,
        synch_freq: int = 0,
        use_streams: bool = True,
        slowmo_sgp_average_params: bool = False,
        verbose: bool = False,
        profile_mode: bool = False,
        process_rank: int | None = None,
        process_world_size: int | None = None,
        global_group: ProcessGroup = None,
        master_group: ProcessGroup = None,
        local_node_group: ProcessGroup = None,
        comm_device: torch.device | None = None,
    ) -> None:
        if overlap or profile_mode:
            raise ConfigurationError(
                f"overlap={overlap}, profile_mode={profile_mode}: gossip does not overlap (fairscale refuses it as "
                "well), and torch.profiler shows where time goes; leave both False"
            )
        nodes = Nodes.of(module, nprocs_per_node, global_group, master_group, local_node_group)
        _check_place(nodes, process_rank, process_world_size)
        shards = slowmo_num_shards if slowmo_memory_efficient else 0
        super().__init__(
            module,
            nodes,
            slowmo_base_algorithm,
            SlowMomentumOptions(slowmo_momentum, slowmo_lr, slowmo_frequency, shards),
            localsgd_frequency=localsgd_frequency,
            gossip=GossipOptions(graph, mixing, push_sum, slowmo_sgp_average_params),
            broadcast_buffers=broadcast_buffers,
        )
        self.logger = _logger(verbose, nodes.world.rank)
        self.broadcast_buffers = broadcast_buffers
        self.localsgd_frequency = localsgd_frequency
        self.slowmo_sgp_average_params = slowmo_sgp_average_params
        self._name_as_fairscale()

    def _name_as_fairscale(self) -> None:
        """Attributes that say where this rank is and what is on."""
        nodes, slow = self._nodes, self._slow
        self.process_rank, self.process_world_size = nodes.world.rank, nodes.world.world_size
        self.nprocs_per_node, self.local_rank = nodes.ranks, nodes.local_rank
        self.logical_rank, self.logical_world_size = nodes.index, nodes.count
        self.localsgd = self._localsgd_frequency > 0
        self.sgp = self._push is not None
        self.slowmo = slow.is_on
        self.slowmo_lr, self.slowmo_momentum = slow.lr, slow.momentum
        self.slowmo_frequency = slow.frequency
        self.slowmo_memory_efficient = slow.shards > 0
        self.slowmo_num_shards = min(nodes.world.world_size, slow.shards) or 1

    @property
    def ps_weight(self) -> torch.Tensor:
        """(SGP) the weight of push-sum, [1]."""
        if self._push is None:
            raise AttributeError("ps_weight: only SGP over several nodes has a weight")
        return self._push.weight

    @property
    def is_sgp_ps_numerator(self) -> bool:
        """(SGP) whether parameters are multiplied by the weight now."""
        return self._push is not None and self._push.is_weighed

    @property
    def num_updates(self) -> int:
        return self._steps


def _check_place(nodes: Nodes, rank: int | None, world_size: int | None) -> None:
    """Raises ConfigurationError for a place, if it is given, that is not the group's."""
    real = nodes.world.rank, nodes.world.world_size
    if any(given not in (None, true) for given, true in zip((rank, world_size), real, strict=True)):
        raise ConfigurationError(
            f"process_rank={rank}, process_world_size={world_size}; the group says {real[0]} of {real[1]}"
        )


def _logger(verbose: bool, rank: int) -> logging.Logger | MultiProcessAdapter:
    logger = logging.getLogger(__name__)
    if not verbose:
        return logger
    logger.setLevel(logging.DEBUG)
    return MultiProcessAdapter(logger, {"process_num": rank})
