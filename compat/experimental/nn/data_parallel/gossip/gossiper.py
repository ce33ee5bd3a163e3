"""fairscale.experimental.nn.data_parallel.gossip.gossiper: one step of averaging with some peers.

Push-sum (Kempe et al., 2003): each node keeps a share of its vector and of its weight, and sends the rest to peers; all
vectors divided by their weights go to the mean. With regular mixing all weights stay 1 and need not be sent.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Iterator

import torch

from shardkit.backend import Group, backend_for
from shardkit.compat.redirected import redirected_names
from shardkit.errors import ConfigurationError

from .graph_manager import GraphManager, MixingManager, UniformMixing

__getattr__ = redirected_names(__name__)


class dist_backend(str, enum.Enum):
    UNDEFINED = "undefined"
    TCP = "tcp"
    MPI = "mpi"
    GLOO = "gloo"
    NCCL = "nccl"


class Gossiper:
    """Sends shares of a vector to peers and sums what comes from others.

    Args:
        msg: a vector like those to be sent.
        device: ignored: messages travel from where they are.
        mixing: how much goes to whom; default: the same to all.
        logger: for debugging; None: silent.
        rank, world_size: ignored: they are the graph's.

    Attributes:
        group: the nodes' ranks; default: all ranks, one a node.
    """

    def __init__(
        self,
        msg: torch.Tensor,
        graph: GraphManager,
        device: torch.device | None = None,
        mixing: MixingManager | None = None,
        logger: logging.Logger | None = None,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        self.logger = logger
        self.device = msg.device
        self.group: Group | None = None
        self._graph_manager = graph
        self._mixing_manager = mixing or UniformMixing(graph, msg.device)
        self.regular = self._mixing_manager.is_regular()
        self.passive = graph.is_passive()
        self.in_msg_buffer = torch.empty(0, dtype=msg.dtype, device=msg.device)
        self._senders = 0
        self._ps_weight = torch.ones(1, dtype=msg.dtype, device=msg.device)
        self.refresh_peers_(rotate=False)
        self.refresh_mixing_weights_()

    @property
    def ps_weight(self) -> torch.Tensor:
        """The weight that was last sent from, [1]."""
        return self._ps_weight

    @ps_weight.setter
    def ps_weight(self, v: torch.Tensor) -> None:
        self._ps_weight.copy_(v)

    @property
    def peers_per_itr(self) -> int:
        """Tells to how many peers a step sends."""
        return self._graph_manager.peers_per_itr

    @peers_per_itr.setter
    def peers_per_itr(self, v: int) -> None:
        self._graph_manager.peers_per_itr = v

    def refresh_peers_(self, rotate: bool | None = None) -> None:
        """Takes the edges of this step (``rotate``: the next one's; default: if the graph is dynamic)."""
        if rotate is None:
            rotate = self._graph_manager.is_dynamic_graph()
        if rotate and not self._graph_manager.is_dynamic_graph():
            raise ConfigurationError(f"{type(self._graph_manager).__name__} has the same peers in every step")
        self.out_edges, self.in_edges = self._graph_manager.get_edges(rotate)

    def refresh_mixing_weights_(self, residual_adjusted: bool = False) -> None:
        """Takes the weights of this step's peers."""
        self.mixing_weights = self._mixing_manager.get_mixing_weights(residual_adjusted)

    def mix_out_msg_(self, out_msg: torch.Tensor, ps_weight: torch.Tensor) -> Iterator[torch.Tensor]:
        """Returns what goes to each peer; with the weight at the end, unless mixing is regular."""
        self.refresh_mixing_weights_(residual_adjusted=True)
        self.ps_weight = ps_weight
        if not self.regular:
            out_msg = torch.cat([out_msg, self.ps_weight.to(out_msg.dtype)])
        for edge in self.out_edges:
            yield out_msg * self.mixing_weights[edge.dest].to(out_msg)

    def mix(self, out_msg: torch.Tensor, ps_weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Makes one step; every node calls it.

        Args:
            out_msg: [n], what is kept of this node's vector; peers get it times their weight over the own one.
            ps_weight: [1], the same of this node's weight.

        Returns:
            What came in, [n] and [1], to be added to what was kept.
        """
        group, n = self._nodes(out_msg), self._graph_manager.nprocs_per_node
        length = out_msg.numel() + (0 if self.regular else 1)
        by_peer = dict(
            zip((e.dest // n for e in self.out_edges), self.mix_out_msg_(out_msg, ps_weight), strict=True)
        )
        sent = torch.cat([by_peer[peer] for peer in sorted(by_peer)])
        sources = {e.src // n for e in self.in_edges}
        received = out_msg.new_empty(len(sources), length)
        group.all_to_all(
            received.view(-1),
            sent,
            [length if node in sources else 0 for node in range(group.world_size)],
            [length if node in by_peer else 0 for node in range(group.world_size)],
            label="gossip",
        )
        if self.logger is not None:
            self.logger.debug("gossip: in %s, out %s", self.in_edges, self.out_edges)
        self.refresh_peers_()
        self.in_msg_buffer = received.sum(0)
        self._senders = len(sources)
        return self.parse_in_msg_buffer()

    def parse_in_msg_buffer(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns what came in with the last step: vectors, [n], and weights, [1], each summed over peers."""
        if self.regular:
            return self.in_msg_buffer, self.ps_weight * self._senders
        return self.in_msg_buffer[:-1], self.in_msg_buffer[-1:]

    def clean_msg_buffers_(self) -> None:
        """Nothing: a step waits for what it sends."""

    def _nodes(self, msg: torch.Tensor) -> Group:
        group = self.group if self.group is not None else backend_for([msg]).group()
        if group.world_size != self._graph_manager.world_size:
            raise ConfigurationError(
                f"the graph has {self._graph_manager.world_size} nodes, the group {group.world_size} ranks; set "
                "gossiper.group to the group of the nodes' first ranks"
            )
        return group


class PushSum(Gossiper):
    """Averaging in which nodes send without waiting to be sent to."""


class PushPull(Gossiper):
    """Averaging in pairs; the same as push-sum here, where a step is one exchange among all nodes."""
