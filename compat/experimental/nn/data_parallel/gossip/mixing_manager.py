"""How much of a model goes to which peer."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from shardkit.compat.redirected import redirected_names

from .graph_manager import GraphManager

__getattr__ = redirected_names(__name__)


class MixingManager(ABC):
    """A column of the mixing matrix: what this rank keeps ("lo") and what it sends to each peer; they sum to 1.

    Args:
        graph: the peers.
        device: of the weights.
    """

    def __init__(self, graph: GraphManager, device: torch.device | None) -> None:
        self.graph_manager = graph
        self.device = device

    def is_regular(self) -> bool:
        """Whether rows of the mixing matrix sum to 1 as well, so that averages have no bias."""
        return self.graph_manager.is_regular_graph() and self.is_uniform()

    @abstractmethod
    def is_uniform(self) -> bool:
        """Whether all weights are the same."""

    @abstractmethod
    def get_mixing_weights(self, residual_adjusted: bool = True) -> dict[str | int, torch.Tensor]:
        """Weights [1] by peer's rank, the own one under "lo".

        Args:
            residual_adjusted: those of peers are divided by the own one.
        """


class UniformMixing(MixingManager):
    """The same weight for each peer and this rank."""

    def get_mixing_weights(self, residual_adjusted: bool = True) -> dict[str | int, torch.Tensor]:
        """1 / (peers + 1) for all; adjusted: 1 for peers. Also that of any peer under "uniform"."""
        peers, _ = self.graph_manager.get_peers()
        own = torch.tensor([1.0 / (len(peers) + 1.0)], device=self.device)
        sent = torch.ones_like(own) if residual_adjusted else own
        weights: dict[str | int, torch.Tensor] = {"lo": own, "uniform": sent.clone()}
        weights.update({peer: sent.clone() for peer in peers})
        return weights

    def is_uniform(self) -> bool:
        """True."""
        return True
