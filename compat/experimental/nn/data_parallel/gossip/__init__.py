"""fairscale.experimental.nn.data_parallel.gossip, its distributed included: LocalSGD, stochastic gradient push, slow
momentum. Nodes step on their own and agree from time to time.

Ranks next to each other make nodes, of which the first ranks talk to each other. By stochastic gradient push, each
step, a node averages with some peers.

Source: Assran et al., "Stochastic Gradient Push for Distributed Deep Learning" (2019).
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
import logging
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from functools import partial
from operator import attrgetter

import torch
import torch.distributed as dist
from torch import nn

from shardkit.backend import Group, ReduceOp, backend_for
from shardkit.errors import ConfigurationError
from shardkit.internal.params import average_gradients, average_together
from shardkit.layout import ShardLayout
from shardkit.oss.exchange import BufferSync, broadcast_module, broadcast_together
from shardkit.torch_seams.hooks import BackwardState, tensors_in, watch_outputs
from shardkit.types import AnyCallable, ProcessGroup, StateDict, Tree

HEARTBEAT_TIMEOUT = 300  # fairscale's; the group's own timeout counts here
BROADCAST_BUCKET_SIZE = 10 * 1024 * 1024

# ------------------------------------------------------------ who gossips with whom
# When, and how much: one step of it. A node is one rank, or all ``nprocs_per_node`` ranks of a machine, of which
# the first one talks. Each step uses ``peers_per_itr`` of a node's peers; dynamic graphs go on to the next ones
# after each step.


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
        self.peers_per_itr = peers_per_itr
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

    _hops = DynamicDirectedLinearGraph._hops


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


# ------------------------------------------------------------ nodes
@dataclasses.dataclass(frozen=True)
class Nodes:
    """This rank's place among nodes of equal size.

    Attributes:
        world: all ranks.
        ranks: how many make a node.
        masters: the first ranks of nodes; None on the others.
        own: the ranks of this node; None where it has one.
    """

    world: Group
    ranks: int
    masters: Group | None
    own: Group | None

    local_rank = property(lambda self: self.world.rank % self.ranks)  # this rank's place within its node
    index = property(lambda self: self.world.rank // self.ranks)
    count = property(lambda self: self.world.world_size // self.ranks)

    @classmethod
    def of(
        cls,
        module: nn.Module,
        ranks: int,
        world: ProcessGroup = None,
        masters: ProcessGroup = None,
        own: ProcessGroup = None,
    ) -> Nodes:
        """Nodes of so many ranks, over the backend that serves the module's parameters (collective).

        Args:
            world, masters, own: process groups, as of the attributes; None: made here.

        Raises:
            ConfigurationError: the ranks don't make whole nodes.
        """
        backend = backend_for(module.parameters())
        everyone: Group = backend.group(world)
        size = everyone.world_size
        if ranks < 1 or size % ranks:
            raise ConfigurationError(
                f"nprocs_per_node is {ranks}; the {size} ranks must make whole nodes of that many"
            )
        if ranks == 1:
            return cls(everyone, ranks, everyone, None)
        if own is not None:
            node: Group = backend.group(own)
        else:
            node = everyone.part_of(range(i, i + ranks) for i in range(0, size, ranks))
        if masters is None:
            return cls(everyone, ranks, everyone.new_group(range(0, size, ranks)), node)
        return cls(everyone, ranks, backend.group(masters) if everyone.rank % ranks == 0 else None, node)


# ------------------------------------------------------------ averages with some peers
@dataclasses.dataclass(frozen=True)
class GossipOptions:
    """With whom to gossip, and how much.

    Attributes:
        graph: the peers; default: each step one peer, 1, 2, 4, ... nodes ahead.
        mixing: the shares; default: the same for each peer and the own node.
        push_sum: PushSum or PushPull, which are the same here.
        averages_before_slow_momentum: average all nodes then, not some.
    """

    graph: GraphManager | None = None
    mixing: MixingManager | None = None
    push_sum: bool = True
    averages_before_slow_momentum: bool = False


class StochasticGradientPush:
    """Parameters of which a node has a share, and the share: their quotient is what the model computes with.

    Args:
        options: with whom, and how much.

    Attributes:
        weight: the share, [1], in fp32 at least.
        is_weighed: whether the parameters are multiplied by it now.
        is_regular: averages with some peers have no bias.

    Raises:
        ConfigurationError: the backend can't send different things from rank to rank.
    """

    def __init__(self, params: Iterable[torch.Tensor], nodes: Nodes, options: GossipOptions) -> None:
        backend = nodes.world.backend
        if backend.even_shards_only:
            raise ConfigurationError(
                f"gossip sends different things from rank to rank, which backend {backend.name!r} can't; "
                "use SlowMoBaseAlgorithm.LOCALSGD"
            )
        self.options = options
        self._params = list(params)
        self._graph = options.graph or NPeerDynamicDirectedExponentialGraph(
            nodes.index, nodes.count, nodes.ranks, nodes.local_rank
        )
        first = self._params[0]
        self._mixing = options.mixing or UniformMixing(self._graph, first.device)
        self.is_regular = self._mixing.is_regular()
        self._gossiper: type[Gossiper] = PushSum if options.push_sum else PushPull
        self.weight = torch.ones(
            1, device=first.device, dtype=torch.promote_types(first.dtype, torch.float32)
        )
        self.is_weighed = False

    def gossip(self, tensors: list[torch.Tensor], nodes: Group) -> None:
        """Makes one step of push-sum: keeps a share, sends the rest, adds what comes."""
        own = self._mixing.get_mixing_weights(residual_adjusted=False)["lo"].to(self.weight)
        weight = self.weight * own
        dtype = tensors[0].dtype
        if any(t.dtype is not dtype for t in tensors):
            raise ConfigurationError("SGP sends parameters as one vector; they must have one dtype")
        flat = flatten_tensors(tensors).mul_(own.to(dtype))
        gossiper = self._gossiper(flat, self._graph, mixing=self._mixing)
        gossiper.group = nodes
        received, received_weight = gossiper.mix(flat, weight.to(dtype))
        for tensor, new in zip(tensors, unflatten_tensors(flat.add_(received), tensors), strict=True):
            tensor.copy_(new)
        self.weight.copy_(torch.ones_like(weight) if self.is_regular else weight + received_weight)

    @torch.no_grad()
    def weigh(self) -> None:
        """Makes parameters what push-sum mixes and the optimizer changes: times their weight."""
        if not self.is_regular and not self.is_weighed:
            torch._foreach_mul_(self._params, self.weight.item())
            self.is_weighed = True

    @torch.no_grad()
    def unbias(self) -> None:
        """Makes parameters what the model uses: divided by their weight."""
        if not self.is_regular and self.is_weighed:
            torch._foreach_div_(self._params, self.weight.item())
            self.is_weighed = False


# ------------------------------------------------------------ training
class SlowMoBaseAlgorithm(str, enum.Enum):
    """Names how nodes agree, more or less, between slow momentum steps."""

    LOCALSGD = "localsgd"
    SGP = "sgp"


@dataclasses.dataclass(frozen=True)
class SlowMomentumOptions:
    """Slow momentum, of which :class:`SlowMomentum` is the computation.

    Attributes:
        momentum, lr: β and α; with 0 and 1 there is no slow momentum.
        frequency: steps from one slow momentum step to the next.
        shards: its state is sharded over so many ranks, and its step averages all of them; 0: each rank has all of it.
    """

    momentum: float = 0.5
    lr: float = 1.0
    frequency: int = 48
    shards: int = 32

    def is_due(self, step: int) -> bool:
        """Says whether it comes after this step, counted from 1."""
        return self.is_on and step % self.frequency == 0

    @property
    def is_on(self) -> bool:
        """Says whether there is slow momentum at all."""
        return self.lr != 1 or self.momentum != 0


class SlowMoDataParallel(nn.Module):
    """Data parallel training in which nodes step on their own and agree from time to time.

    After each ``optimizer.step()`` comes ``model.perform_slowmo(optimizer)``. The ranks of a node share gradients in
    every backward. LocalSGD averages nodes every ``localsgd_frequency`` steps;
    SGP (stochastic gradient push) averages with some peers in every step. Rank 0's parameters are taken at the start,
    and slow momentum starts from them. LocalSGD averages before every slow momentum step.

    Args:
        module: the model.
        nodes: which ranks make a node.
        algorithm: LOCALSGD or SGP.
        slow: slow momentum.
        localsgd_frequency: steps from one average to the next.
        gossip: (SGP) with whom to gossip, and how much.
        broadcast_buffers: take rank 0's buffers after training forwards.

    Raises:
        ConfigurationError: options that don't fit.
    """

    def __init__(
        self,
        module: nn.Module,
        nodes: Nodes,
        algorithm: SlowMoBaseAlgorithm = SlowMoBaseAlgorithm.LOCALSGD,
        slow: SlowMomentumOptions | None = None,
        *,
        localsgd_frequency: int = 3,
        gossip: GossipOptions | None = None,
        broadcast_buffers: bool = True,
    ) -> None:
        super().__init__()
        self.module = module
        self._nodes = nodes
        broadcast_module(module, nodes.world)
        self._buffers_sync = BufferSync(module, nodes.world, broadcast_buffers)
        self._backward = BackwardState(self._after_backward)
        several = nodes.count > 1  # else the ranks of one node agree in every backward
        is_push = SlowMoBaseAlgorithm(algorithm) is SlowMoBaseAlgorithm.SGP
        self._localsgd_frequency = localsgd_frequency if several and not is_push else 0
        self._slow = slow or SlowMomentumOptions()
        self._slow_momentum = SlowMomentum(nodes.world, self._slow)
        self._steps = 0
        self._push: StochasticGradientPush | None = None
        if several and is_push:
            gossip = gossip or GossipOptions()
            self._push = StochasticGradientPush(module.parameters(), nodes, gossip)
            averages = self._slow.shards or gossip.averages_before_slow_momentum
            if self._slow.is_on and not averages and not self._push.is_regular:
                raise ConfigurationError(
                    "this mixing gives biased averages, which slow momentum can't be applied to; set "
                    "slowmo_memory_efficient or slowmo_sgp_average_params"
                )
        self._begin()

    def _begin(self) -> None:
        """Starts slow momentum from the parameters of now, kept on the host until the optimizer is known."""
        self._slow_momentum.started = False
        params = self.module.parameters() if self._slow.is_on else ()
        self._start = [p.detach().to("cpu", copy=True) for p in params]

    # -------------------------------------------------------------------------------------- training
    def forward(self, *inputs: Tree, **kwargs: Tree) -> Tree:
        if self._push is not None:
            self._push.unbias()
        if self.training:
            self._buffers_sync.sync_if_changed()
            self._buffers_sync.changed = True
        outputs = self.module(*inputs, **kwargs)
        if torch.is_grad_enabled() and (self._nodes.own is not None or self._push is not None):
            watch_outputs(tensors_in(outputs), partial(self._backward.on_output, 0))
        return outputs

    def _after_backward(self) -> None:
        if self._nodes.own is not None:
            average_gradients([p for p in self.module.parameters() if p.requires_grad], self._nodes.own)
        if self._push is not None:
            self._push.weigh()

    @torch.no_grad()
    def perform_slowmo(self, optimizer: torch.optim.Optimizer, fp32_params: Tree = None) -> None:
        """Averages and applies slow momentum, when they are due; all ranks call it after each ``optimizer.step()``.

        Args:
            optimizer: whose parameters slow momentum is applied to.
            fp32_params: the parameters' fp32 copies where they are fp16: one vector, a list, or a dict of one of them.
        """
        copies = _copies(fp32_params)
        if self._slow.is_on and not self._slow_momentum.started:
            start = self._start  # of parameters, or of their copies
            if len(copies) == 1 and len(start) > 1:
                start = [torch.cat([t.reshape(-1) for t in start])]
            values = dict(zip(copies or self.module.parameters(), start, strict=True))
            self._slow_momentum.start(optimizer, values)
            self._start = []
        if self._push is not None:
            self._push.weigh()
        step = self._steps + 1
        slow = self._slow.is_due(step)
        averages_itself = slow and self._slow.shards > 0
        if self._push is not None:
            average = slow and self._push.options.averages_before_slow_momentum
        else:
            average = self._localsgd_frequency > 0 and (slow or step % self._localsgd_frequency == 0)
        if not averages_itself and (average or self._push is not None):
            self._agree(copies or list(self.module.parameters()), average)
        if slow:
            self._slow_momentum.step(optimizer)
        if self._push is not None and (averages_itself or average):
            self._push.weight.fill_(1)
        if copies:
            params: list[torch.Tensor] = [*self.module.parameters()]
            flat = copies[0] if len(copies) == 1 else flatten_tensors(copies)
            for p, new in zip(params, unflatten_tensors(flat, params), strict=True):
                p.copy_(new)
        self._steps = step

    def _agree(self, tensors: list[torch.Tensor], average: bool) -> None:
        """Takes all nodes' average, or a step of gossip; then the node's other ranks take what its first rank has."""
        masters, node = self._nodes.masters, self._nodes.own
        if masters is not None and average:
            average_together(tensors, masters, "parameters")
        elif masters is not None and self._push is not None:
            self._push.gossip(tensors, masters)
        if node is not None:
            broadcast_together(tensors, node, "parameters of the node's first rank")

    # -------------------------------------------------------------------------------------- checkpoints
    def state_dict(self) -> StateDict:  # type: ignore[override]
        """Returns the module's, and for SGP the weight of push-sum; slow momentum is not in it."""
        state: StateDict = super().state_dict()
        if self._push is not None:
            state["ps_weight"] = self._push.weight.cpu()
            state["is_sgp_ps_numerator"] = self._push.is_weighed
        return state

    def load_state_dict(self, state_dict: StateDict) -> None:  # type: ignore[override]
        """Takes the state over; slow momentum begins anew from there. The argument is left alone."""
        state = dict(state_dict)
        if self._push is not None:
            self._push.weight.copy_(state.pop("ps_weight"))
            self._push.is_weighed = bool(state.pop("is_sgp_ps_numerator"))
        super().load_state_dict(state)
        self._begin()


def _copies(fp32_params: Tree) -> list[torch.Tensor]:
    if isinstance(fp32_params, dict):
        if len(fp32_params) != 1:
            raise ConfigurationError(f"fp32_params is a dict of {len(fp32_params)}; there must be one entry")
        (fp32_params,) = fp32_params.values()
    if fp32_params is None:
        return []
    return [fp32_params] if isinstance(fp32_params, torch.Tensor) else list(fp32_params)


# ------------------------------------------------------------ slow momentum
# Sources: Stich, "Local SGD Converges Fast and Communicates Little" (2019); Wang et al., "SlowMo: Improving
# Communication-Efficient Distributed SGD with Slow Momentum" (2020), Algorithm 1: after the inner steps with rate γ,
#
#    u <- β u + (x_0 - mean(x)) / γ,    x_0 <- x_0 - α γ u,    x <- x_0 on all ranks.


class SlowMomentum:
    """The outer step: slow momentum on what the inner optimizers of all ranks have reached.

    Parameters of the optimizer, seen as one vector, are cut into equal shards. The rank that owns a shard averages it
    over all ranks, applies the momentum, and sends it to all. The first ranks share the state (twice the parameters);
    without shards every rank has all of it, and parameters are averaged by somebody else, before.
    """

    def __init__(self, group: Group, options: SlowMomentumOptions) -> None:
        self._group, self._options = group, options
        self._num_shards = min(options.shards, group.world_size)
        self.started = False

    @torch.no_grad()
    def start(self, optimizer: torch.optim.Optimizer, values: dict[torch.Tensor, torch.Tensor]) -> None:
        """Begins anew from these values of parameters (default: what they are now), without momentum.

        Raises:
            ConfigurationError: the parameters have several dtypes or devices.
        """
        params = [p for group in optimizer.param_groups for p in group["params"]]
        kinds = {(p.dtype, p.device) for p in params}
        if len(kinds) != 1:
            raise ConfigurationError(
                f"slow momentum needs parameters of one dtype on one device; the optimizer has {kinds}"
            )
        self.started = True
        self._outer = self._velocity = torch.empty(0)  # x_0 and u, of the own shard
        now = [values.get(p, p) for p in params]
        for k, (p, value) in enumerate(zip(params, now, strict=True)):
            if value.stride() != p.stride():  # laid out as it is
                laid_out = torch.empty_strided(p.shape, p.stride(), dtype=value.dtype)
                now[k] = laid_out.copy_(value.view(p.shape))
        for shard, pieces in self._shards(now):
            if self._owns(shard):
                self._outer = torch.cat([values for _, values in pieces]).to(params[0])
                self._velocity = torch.zeros_like(self._outer)

    @torch.no_grad()
    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Makes a slow step; every rank calls it, after the same number of inner steps."""
        listed = [(p, group["lr"]) for group in optimizer.param_groups for p in group["params"]]
        for shard, pieces in self._shards([p for p, _ in listed]):
            rates = [listed[item][1] for item, _ in pieces]
            views = [values for _, values in pieces]
            if self._num_shards == 0:
                self._apply(views, rates)
                continue
            flat = torch.cat(views)
            self._group.reduce(flat, shard, op=ReduceOp.AVG, label="slow momentum")
            parts = flat.split([values.numel() for values in views])
            if self._owns(shard):
                self._apply(parts, rates)
            self._group.broadcast(flat, shard, label="slow momentum")
            for part, values in zip(parts, views, strict=True):
                values.copy_(part)

    def _shards(self, params: Sequence[torch.Tensor]) -> Iterator[tuple[int, list[tuple[int, torch.Tensor]]]]:
        """Lists shards that have elements: their pieces of parameters, as views [n] in the order of their memory."""
        layout = ShardLayout(tuple(p.numel() for p in params), max(self._num_shards, 1))
        for shard, pieces in itertools.groupby(layout.pieces(), key=lambda piece: piece.rank):
            vectors = ((p, params[p.item]) for p in pieces)  # of any dense layout, as channels last
            yield (
                shard,
                [
                    (p.item, t.detach().as_strided((p.numel,), (1,), t.storage_offset() + p.start))
                    for p, t in vectors
                ],
            )

    def _owns(self, shard: int) -> bool:
        return self._num_shards == 0 or shard == self._group.rank

    def _apply(self, parts: Sequence[torch.Tensor], rates: Sequence[float]) -> None:
        """Applies Algorithm 1 to the own shard, in place, with the inner optimizer's rate of each part."""
        sizes = [values.numel() for values in parts]
        outers, velocities = self._outer.split(sizes), self._velocity.split(sizes)
        for values, lr, outer, velocity in zip(parts, rates, outers, velocities, strict=True):
            # nothing can be said about u; where the optimizer moved nothing, x_0 stays as well
            if lr == 0:
                outer.copy_(values)
                continue
            velocity.mul_(self._options.momentum).add_((outer - values) / lr)
            outer.sub_(velocity * (self._options.lr * lr))
            values.copy_(outer)


# ------------------------------------------------------------ by fairscale's name
class SlowMoDistributedDataParallel(SlowMoDataParallel):
    """:class:`SlowMoDataParallel` with fairscale's arguments. Where it departs from fairscale's:

    * Rank 0's parameters are taken at the start, and slow momentum starts from them. fairscale starts from what each
      rank has after its first step, and ranks never come together again without ``slowmo_memory_efficient``.
    * LocalSGD averages before every slow momentum step (fairscale: only where ``slowmo_frequency`` is a multiple of
      ``localsgd_frequency``, or with ``slowmo_memory_efficient``).
    * With ``fp32_params``, those are averaged, not the fp16 ones with a correction of their errors.
    * Weights of push-sum are 1 again after a full average.

    Args:
        nprocs_per_node: how many ranks, next to each other, make a node.
        broadcast_buffers, slowmo_base_algorithm, localsgd_frequency: as there.
        slowmo_momentum, slowmo_lr, slowmo_frequency: as of :class:`SlowMomentumOptions`.
        slowmo_memory_efficient: its state is sharded over ranks, at most ``slowmo_num_shards``.
        graph, mixing, push_sum: (SGP) as of :class:`GossipOptions`.
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
        place = nodes.world.rank, nodes.world.world_size
        if process_rank not in (None, place[0]) or process_world_size not in (None, place[1]):
            raise ConfigurationError(
                f"process_rank={process_rank}, process_world_size={process_world_size}; the group says {place[0]} of "
                f"{place[1]}"
            )
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
        self.logger: logging.Logger | MultiProcessAdapter = logging.getLogger(__name__)
        if verbose:
            self.logger.setLevel(logging.DEBUG)
            self.logger = MultiProcessAdapter(self.logger, {"process_num": nodes.world.rank})
        self.broadcast_buffers = broadcast_buffers
        self.localsgd_frequency = localsgd_frequency
        self.slowmo_sgp_average_params = slowmo_sgp_average_params
        # where this rank is, and what is on, by fairscale's names
        self.process_rank, self.process_world_size = place
        self.nprocs_per_node, self.local_rank = nodes.ranks, nodes.local_rank
        self.logical_rank, self.logical_world_size = nodes.index, nodes.count
        self.localsgd, self.sgp = self._localsgd_frequency > 0, self._push is not None
        self.slowmo, self.slowmo_lr, self.slowmo_momentum = self._slow.is_on, slowmo_lr, slowmo_momentum
        self.slowmo_frequency, self.slowmo_memory_efficient = slowmo_frequency, shards > 0
        self.slowmo_num_shards = min(nodes.world.world_size, shards) or 1

    @property
    def ps_weight(self) -> torch.Tensor:
        """Returns the weight of push-sum, [1] (SGP)."""
        if self._push is None:
            raise AttributeError("ps_weight: only SGP over several nodes has a weight")
        return self._push.weight

    @property
    def is_sgp_ps_numerator(self) -> bool:
        """Says whether parameters are multiplied by the weight now (SGP)."""
        return self._push is not None and self._push.is_weighed

    num_updates = property(attrgetter("_steps"))


# ------------------------------------------------------------ its utils: groups, loggers, messages
HANDLER_AND_LEVEL_SET: set[logging.Logger] = set()


def create_process_group(ranks: list[int]) -> dist.ProcessGroup:
    return dist.new_group(ranks=ranks)


def make_logger(rank: int, verbose: bool = True) -> logging.Logger:
    """Returns this module's logger, writing to stdout with the rank in front."""
    logger = logging.getLogger(__name__)
    if logger not in HANDLER_AND_LEVEL_SET:
        handler = logging.StreamHandler(stream=sys.stdout)
        handler.setFormatter(logging.Formatter(f"{rank}: %(levelname)s -- %(threadName)s -- %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.DEBUG if verbose else logging.INFO)
        HANDLER_AND_LEVEL_SET.add(logger)
    return logger


class MultiProcessAdapter(logging.LoggerAdapter):
    """Puts the number of the process in front of messages."""

    def process(self, msg: str, kwargs: MutableMapping[str, Tree]) -> tuple[str, MutableMapping[str, Tree]]:
        """Returns the message with ``process_num`` of the call, or else of this adapter."""
        number = kwargs.pop("process_num", (self.extra or {}).get("process_num"))
        return f"process: {number} {msg}", kwargs


def flatten_tensors(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Returns a new vector of all elements; the tensors have one dtype."""
    return torch.cat([t.reshape(-1) for t in tensors])


def unflatten_tensors(flat: torch.Tensor, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Returns views of a vector in the shapes of these tensors."""
    pieces = flat.split([t.numel() for t in tensors])
    return [piece.view(t.shape) for piece, t in zip(pieces, tensors, strict=True)]


def group_by_dtype(tensors: list[torch.Tensor]) -> dict[torch.dtype, list[torch.Tensor]]:
    """Returns the tensors of each dtype, in order."""
    groups: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.dtype, []).append(tensor)
    return groups


def communicate(
    tensors: list[torch.Tensor], communication_op: AnyCallable, logger: logging.Logger | None = None
) -> None:
    """Calls ``communication_op(tensor=flat)`` once for each dtype and writes back what it made of ``flat``."""
    for same in group_by_dtype(tensors).values():
        with torch.no_grad():
            flat = flatten_tensors(same)
            communication_op(tensor=flat)
            for tensor, new in zip(same, unflatten_tensors(flat, same), strict=True):
                tensor.copy_(new)
        if logger is not None:
            logger.debug("communicated %d tensors of %s", len(same), flat.dtype)
