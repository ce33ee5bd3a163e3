"""Ranks next to each other make nodes, of which the first ranks talk to each other."""

from __future__ import annotations

import dataclasses

from torch import nn

from shardkit.backend import Group, backend_for
from shardkit.errors import ConfigurationError
from shardkit.types import ProcessGroup


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

    @property
    def local_rank(self) -> int:
        """This rank's place within its node."""
        return self.world.rank % self.ranks

    @property
    def index(self) -> int:
        return self.world.rank // self.ranks

    @property
    def count(self) -> int:
        return self.world.world_size // self.ranks

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
        local_rank, index = everyone.rank % ranks, everyone.rank // ranks
        node: Group | None
        if own is not None:
            node = backend.group(own)
        else:
            node = [everyone.new_group(range(i, i + ranks)) for i in range(0, size, ranks)][index]
        if masters is None:
            return cls(everyone, ranks, everyone.new_group(range(0, size, ranks)), node)
        return cls(everyone, ranks, backend.group(masters) if local_rank == 0 else None, node)
