"""Who updates which parameter, and which pieces of it travel: integer arithmetic, without tensors and processes.

Legend: W world size.

Every rank computes the same plan from the same layouts. A parameter is cut where shards end
(:meth:`~shardkit.layout.ShardLayout.pieces`), and its owner needs the pieces that lie elsewhere. Owners are balanced by
what an update costs, over all units together. Where a parameter lies decides only between ranks that have room for it:
the fewer parameters straddle (``FSDP(align=...)``), the less travels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..layout import Piece

ALLOWANCE = 1.1  # of the mean cost: so much may a rank have more, if that keeps pieces where they are


@dataclass(frozen=True)
class Item:
    """A parameter, or several that have to have one owner.

    Attributes:
        cost: of its update, in any unit.
        held: numel of it that each rank has, [W].
    """

    cost: float
    held: tuple[int, ...]


def owners_of(items: Sequence[Item], world_size: int) -> list[int]:
    """The rank that updates each item.

    The costliest are placed first. An item goes to the rank that has most of it, if that one does not get more than
    the mean and the :data:`ALLOWANCE`; else to the rank with the least so far. So no rank gets more than the mean, the
    allowance and one item.
    """
    loads = [0.0] * world_size
    owners = [0] * len(items)
    room = ALLOWANCE * sum(i.cost for i in items) / world_size
    for index in sorted(range(len(items)), key=lambda i: (-items[i].cost, i)):
        item = items[index]
        ranks = range(world_size)
        rank = max(ranks, key=lambda r: (item.held[r], -loads[r], -r))
        if loads[rank] + item.cost > room:
            rank = min(ranks, key=lambda r: (loads[r], -item.held[r], r))
        loads[rank] += item.cost
        owners[index] = rank
    return owners


def held_by_ranks(pieces: Sequence[Piece], world_size: int) -> tuple[int, ...]:
    """Numel on each rank, [W]."""
    held = [0] * world_size
    for piece in pieces:
        held[piece.rank] += piece.numel
    return tuple(held)


@dataclass(frozen=True)
class Route:
    """What one rank sends before a step and receives after it, or the other way round.

    Attributes:
        pieces: with the other rank of each: all for rank 0 first, then all for rank 1, ...; ``item`` counts the
            parameters that the plan was made of.
        numels: numel of all pieces for each rank, [W].
        counts: how many these are, [W].
    """

    pieces: tuple[tuple[int, Piece], ...]
    numels: tuple[int, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """The pieces that travel between a rank and the owners.

    Attributes:
        away: of other ranks' parameters, here.
        own: of this rank's parameters, elsewhere.
        total: numel of what travels one way, of all ranks together.
    """

    away: Route
    own: Route
    total: int


def plan_of(pieces: Sequence[Sequence[Piece]], owners: Sequence[int], rank: int, world_size: int) -> Plan:
    """The plan of one rank.

    Args:
        pieces: of each parameter.
        owners: of each parameter.
        rank: whose plan it is.
        world_size: W.
    """
    away: list[tuple[int, Piece]] = []
    own: list[tuple[int, Piece]] = []
    total = 0
    for item, (cut, owner) in enumerate(zip(pieces, owners, strict=True)):
        for piece in cut:
            if piece.rank == owner:
                continue
            total += piece.numel
            numbered = Piece(item, piece.start, piece.rank, piece.offset, piece.numel)
            if piece.rank == rank:
                away.append((owner, numbered))
            elif owner == rank:
                own.append((piece.rank, numbered))
    return Plan(_route(away, world_size), _route(own, world_size), total)


def _route(pieces: list[tuple[int, Piece]], world_size: int) -> Route:
    pieces.sort(key=lambda found: found[0])  # stable: items stay in order
    numels, counts = [0] * world_size, [0] * world_size
    for other, piece in pieces:
        numels[other] += piece.numel
        counts[other] += 1
    return Route(tuple(pieces), tuple(numels), tuple(counts))
