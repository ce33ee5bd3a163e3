"""Who gossips with whom, when, and how much: one step of it.

A node is one rank, or all ``nprocs_per_node`` ranks of a machine, of which the first one talks. Each step uses
``peers_per_itr`` of a node's peers; dynamic graphs go on to the next ones after each step.

Source: Assran et al., "Stochastic Gradient Push for Distributed Deep Learning" (2019).
"""

from __future__ import annotations

import enum
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from operator import attrgetter

import torch

from shardkit.backend import Group, backend_for
from shardkit.errors import ConfigurationError


class Edge:
    """A way from the rank ``src`` to the rank ``dest``.

    It needs no process group, as in fairscale: messages of a step go through one all-to-all.
    """

    def __init__(self, local_master_rank: int, dest: int, src: int, local_rank: int) -> None:
        self.src = src
        self.dest = dest

    def __repr__(self) -> str:
        return f"Edge({self.src} -> {self.dest})"


class GraphManager(ABC):
    """The peers of each node.

    Args:
        world_size: how many nodes there are.
        nprocs_per_node: ranks of a node.
        local_rank: this rank within its node.
        peers_per_itr: to how many peers a node sends in a step.

    Raises:
        ConfigurationError: a node has fewer peers than that, or there is only one node.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        nprocs_per_node: int = 1,
        local_rank: int = 0,
        peers_per_itr: int = 1,
    ) -> None:
        if world_size < 2:
            raise ConfigurationError(f"gossip needs two nodes or more; there is {world_size}")
        if peers_per_itr < 1:
            raise ConfigurationError(f"peers_per_itr is {peers_per_itr}; a node sends to one peer or more")
        self.rank = rank
        self.world_size = world_size
        self.nprocs_per_node = nprocs_per_node
        self.local_rank = local_rank
        self.phone_book: list[list[Edge]] = [[] for _ in range(world_size)]
        self._peers_per_itr = peers_per_itr
        self._group_indices = list(range(peers_per_itr))
        self._make_graph()
        fewest = min(len(edges) for edges in self.phone_book)
        if peers_per_itr > fewest:
            raise ConfigurationError(
                f"peers_per_itr is {peers_per_itr}; a node of this graph of {world_size} has {fewest} peers"
            )

    @property
    def peers_per_itr(self) -> int:
        """Tells to how many peers a node sends in a step."""
        return self._peers_per_itr

    @peers_per_itr.setter
    def peers_per_itr(self, v: int) -> None:
        self._peers_per_itr = v
        self._group_indices = list(range(v))

    @abstractmethod
    def _make_graph(self) -> None:
        """Fills the phone book: for each node where it may send to."""

    def _add_peers(self, rank: int, peers: list[int]) -> None:
        n = self.nprocs_per_node
        for peer in peers:
            if peer != rank and all(e.dest != peer * n for e in self.phone_book[rank]):
                self.phone_book[rank].append(Edge(self.rank * n, peer * n, rank * n, self.local_rank))

    def is_regular_graph(self) -> bool:
        """Says whether each node hears from as many peers as it sends to."""
        return True

    def is_bipartite_graph(self) -> bool:
        """Says whether nodes are of two kinds that only talk to each other."""
        return False

    def is_passive(self, rank: int | None = None) -> bool:
        """Says whether a node (default: this one) waits to be spoken to."""
        return False

    def is_dynamic_graph(self) -> bool:
        """Says whether each step has other peers."""
        return True

    def get_edges(self, rotate: bool = False) -> tuple[list[Edge], list[Edge]]:
        """Returns this step's edges from and to this node; ``rotate``: the next step's."""
        if rotate:
            peers = len(self.phone_book[self.rank])
            self._group_indices = [(i + self.peers_per_itr) % peers for i in self._group_indices]
        mine = self.rank * self.nprocs_per_node
        out = [self.phone_book[self.rank][i] for i in self._group_indices]
        into = [edges[i] for i in self._group_indices for edges in self.phone_book if edges[i].dest == mine]
        return out, into

    def get_peers(self, rotate: bool = False) -> tuple[list[int], list[int]]:
        """Finds, as :meth:`get_edges`, ranks sent to and nodes heard from."""
        out, into = self.get_edges(rotate)
        return [e.dest for e in out], [e.src // self.nprocs_per_node for e in into]

    def _rotate_forward(self, r: int, p: int) -> int:
        return (r + p) % self.world_size

    def _rotate_backward(self, r: int, p: int) -> int:
        return (r - p) % self.world_size


def _powers(base: int, world_size: int) -> list[int]:
    """Lists 1, base, base², ..., all less than the world."""
    powers = [1]
    while powers[-1] * base < world_size:
        powers.append(powers[-1] * base)
    return powers


class _TwoWay(GraphManager):
    """Peers at some distances, in both directions."""

    @abstractmethod
    def _hops(self) -> Iterable[int]:
        """Distances of peers, in the order of their use."""

    def _make_graph(self) -> None:
        if self.is_bipartite_graph() and self.world_size % 2 == 1:
            raise ConfigurationError(
                f"{type(self).__name__} pairs even with odd nodes; it needs an even number, there are {self.world_size}"
            )
        for rank in range(self.world_size):
            for hop in self._hops():
                self._add_peers(rank, [self._rotate_forward(rank, hop), self._rotate_backward(rank, hop)])


class _Bipartite(_TwoWay):
    """Peers at odd distances, which are of the other kind."""

    def is_bipartite_graph(self) -> bool:
        return True

    def is_passive(self, rank: int | None = None) -> bool:
        return (self.rank if rank is None else rank) % 2 == 0


class DynamicDirectedExponentialGraph(_TwoWay):
    """Peers 1, 2, 4, ... nodes away."""

    def _hops(self) -> Iterable[int]:
        return _powers(2, self.world_size)


class NPeerDynamicDirectedExponentialGraph(GraphManager):
    """Peers ahead, 1 ... n times (n + 1)^i nodes away, for n peers a step."""

    def _make_graph(self) -> None:
        n = self.peers_per_itr
        for rank in range(self.world_size):
            for power in _powers(n + 1, self.world_size):
                self._add_peers(rank, [self._rotate_forward(rank, j * power) for j in range(1, n + 1)])


class DynamicBipartiteExponentialGraph(_Bipartite):
    """Peers 1, 3, 5, 9, ... nodes away."""

    def _hops(self) -> Iterable[int]:
        return [1, *(1 + power for power in _powers(2, self.world_size)[1:])]


class DynamicDirectedLinearGraph(_TwoWay):
    """Peers 1, 3, 5, ... nodes away."""

    def _hops(self) -> Iterable[int]:
        return range(1, self.world_size, 2)


class DynamicBipartiteLinearGraph(_Bipartite):
    """All nodes of the other kind, nearest first."""

    def _hops(self) -> Iterable[int]:
        return range(1, self.world_size, 2)


class RingGraph(_TwoWay):
    def _hops(self) -> Iterable[int]:
        return (1,)

    def is_dynamic_graph(self) -> bool:
        return False


# ------------------------------------------------------------ mixing
class MixingManager(ABC):
    """A column of the mixing matrix: what this rank keeps ("lo") and what it sends to each peer; they sum to 1.

    Args:
        device: of the weights.
    """

    def __init__(self, graph: GraphManager, device: torch.device | None) -> None:
        self.graph_manager = graph
        self.device = device

    def is_regular(self) -> bool:
        """Says whether rows of the mixing matrix sum to 1 as well, so that averages have no bias."""
        return self.graph_manager.is_regular_graph() and self.is_uniform()

    @abstractmethod
    def is_uniform(self) -> bool:
        """Says whether all weights are the same."""

    @abstractmethod
    def get_mixing_weights(self, residual_adjusted: bool = True) -> dict[str | int, torch.Tensor]:
        """Returns weights [1] by peer's rank, the own one under "lo".

        Args:
            residual_adjusted: those of peers are divided by the own one.
        """


class UniformMixing(MixingManager):
    """The same weight for each peer and this rank."""

    def get_mixing_weights(self, residual_adjusted: bool = True) -> dict[str | int, torch.Tensor]:
        """Returns 1 / (peers + 1) for all; adjusted: 1 for peers. Also that of any peer under "uniform"."""
        peers, _ = self.graph_manager.get_peers()
        own = torch.tensor([1.0 / (len(peers) + 1.0)], device=self.device)
        sent = torch.ones_like(own) if residual_adjusted else own
        weights: dict[str | int, torch.Tensor] = {"lo": own, "uniform": sent.clone()}
        weights.update({peer: sent.clone() for peer in peers})
        return weights

    def is_uniform(self) -> bool:
        return True


# ------------------------------------------------------------ one step of averaging with some peers
# Push-sum (Kempe et al., 2003): each node keeps a share of its vector and of its weight, and sends the rest to peers;
# all vectors divided by their weights go to the mean. With regular mixing all weights stay 1 and need not be sent.
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

    # the weight that was last sent from, [1]; to how many peers a step sends
    ps_weight = property(attrgetter("_ps_weight"), lambda self, v: self._ps_weight.copy_(v))
    peers_per_itr = property(
        attrgetter("_graph_manager.peers_per_itr"),
        lambda self, v: setattr(self._graph_manager, "peers_per_itr", v),
    )

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
        group = self.group if self.group is not None else backend_for([out_msg]).group()
        n = self._graph_manager.nprocs_per_node
        if group.world_size != self._graph_manager.world_size:
            raise ConfigurationError(
                f"the graph has {self._graph_manager.world_size} nodes, the group {group.world_size} ranks; set "
                "gossiper.group to the group of the nodes' first ranks"
            )
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
        """Does nothing: a step waits for what it sends."""


class PushSum(Gossiper):
    """Averaging in which nodes send without waiting to be sent to."""


class PushPull(Gossiper):
    """Averaging in pairs; the same as push-sum here, where a step is one exchange among all nodes."""
