"""Stochastic gradient push: each step, a node averages with some peers.

Source: Assran et al., "Stochastic Gradient Push for Distributed Deep Learning" (2019).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import torch

from shardkit.backend import Group
from shardkit.errors import ConfigurationError

from .gossiper import Gossiper, PushPull, PushSum
from .graph_manager import GraphManager, MixingManager, NPeerDynamicDirectedExponentialGraph, UniformMixing
from .nodes import Nodes
from .utils import flatten_tensors, unflatten_tensors


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
        params: the model's.
        nodes: who gossips.
        options: with whom, and how much.

    Attributes:
        weight: the share, [1], in fp32 at least.
        is_weighed: whether the parameters are multiplied by it now.

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
        self._regular = self._mixing.is_regular()
        self._gossiper: type[Gossiper] = PushSum if options.push_sum else PushPull
        self.weight = torch.ones(
            1, device=first.device, dtype=torch.promote_types(first.dtype, torch.float32)
        )
        self.is_weighed = False

    def check_unbiased(self) -> None:
        """Raises ConfigurationError where averages with some peers have a bias."""
        if not self._regular:
            raise ConfigurationError(
                "this mixing gives biased averages, which slow momentum can't be applied to; set "
                "slowmo_memory_efficient or slowmo_sgp_average_params"
            )

    def gossip(self, tensors: list[torch.Tensor], nodes: Group) -> None:
        """One step of push-sum: keeps a share, sends the rest, adds what comes."""
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
        self.weight.copy_(torch.ones_like(weight) if self._regular else weight + received_weight)

    @torch.no_grad()
    def weigh(self) -> None:
        """Parameters as push-sum mixes them and the optimizer changes them: times their weight."""
        if not self._regular and not self.is_weighed:
            torch._foreach_mul_(self._params, self.weight.item())
            self.is_weighed = True

    @torch.no_grad()
    def unbias(self) -> None:
        """Parameters as the model uses them: divided by their weight."""
        if not self._regular and self.is_weighed:
            torch._foreach_div_(self._params, self.weight.item())
            self.is_weighed = False
