"""A rank of the XLA backend, and what it asks of its host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from shardkit.backend import Group

from .collectives import Collectives, Groups
from .meeting import Call


class ReplicaHost(Protocol):
    """What a replica's group needs besides XLA's collectives."""

    def issued(self, call: Call) -> None:
        """A collective was added to the graph."""
        ...

    def exchange(self, ranks: Sequence[int], what: str, label: str, payload: bytes) -> list[bytes]:
        """Each rank's payload, in group order."""
        ...

    def partition(self, ranks: Sequence[int], siblings: Sequence[Sequence[int]]) -> Groups:
        """The groups of all ranks while this one uses ``ranks``; siblings are those that were made beside it.

        Where all ranks have to say so, it is an exchange.
        """
        ...

    def abort(self) -> None:
        """Drops what this replica has recorded and not run."""
        ...


@dataclass(frozen=True)
class Replica:
    """One rank of the job: its global rank, and its ways to the others."""

    rank: int
    world_size: int
    collectives: Collectives
    host: ReplicaHost
    root: list[Group] = field(default_factory=list)  # the group of all ranks, once it was asked for
    # Those of torch.distributed, by ranks: thousands of ranks are not to be listed again for each unit of a model.
    parts: dict[tuple[int, ...], Group] = field(default_factory=dict)
