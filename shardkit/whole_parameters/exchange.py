"""Brings pieces of parameters to the owners before a step, and back after it: one all-to-all each way.

Legend: W world size, K number of pieces that one rank sends to another.

What a rank sends to an owner: the values of all pieces, their gradients, and a flag for each piece that tells whether
it has a gradient. An owner without a piece of a parameter can't know that by itself. What comes back are values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, chain, pairwise

import torch

from ..backend import DONE, Group, Work
from ..layout import Piece
from ..tracing.ranges import WholeRanges
from .bringing import Bringing, Owned, shard_of
from .listed import Part
from .plan import Plan, Route, plan_of


class Exchange(Bringing):
    """Between the ranks of one group, of parameters of one dtype on one device.

    Args:
        group: the ranks; a channel of its own.
        parts: all that don't lie on their owners as a whole, the same on all ranks.
        owners: the rank that updates each.
        device: where pieces travel from and to, if it is not where they lie.

    Attributes:
        owned: those that this rank updates, in order.
    """

    def __init__(
        self, group: Group, parts: Sequence[Part], owners: Sequence[int], device: torch.device
    ) -> None:
        self._group, self._parts, self._owners, self._device = group, list(parts), list(owners), device
        self._like = shard_of(self._parts[0]).view(-1)[:0]
        self.owned = [
            Owned(p, self._like) for p, owner in zip(parts, owners, strict=True) if owner == group.rank
        ]
        self._by_number = {
            number: self.owned[k]
            for k, number in enumerate([n for n, owner in enumerate(owners) if owner == group.rank])
        }
        self._flags: dict[tuple[bool, ...], torch.Tensor] = {}
        self._plans: dict[tuple[bool, ...], Plan] = {}
        self._arriving: tuple[Plan, bool, torch.Tensor, torch.Tensor, Work] | None = None
        self._to_owners = WholeRanges("parameters to owners", group.ranks)
        self._to_shards = WholeRanges("updated parameters", group.ranks)

    def _plan(self) -> Plan:
        """Frozen parameters don't travel; all ranks know which are."""
        trains = tuple([p.trains for p in self._parts])
        if trains not in self._plans:
            cut = [p.pieces if t else () for p, t in zip(self._parts, trains, strict=True)]
            self._plans = {trains: plan_of(cut, self._owners, self._group.rank, self._group.world_size)}
        return self._plans[trains]

    # ------------------------------------------------------------ to the owners
    def start(self, gradients: bool) -> None:
        plan = self._plan()
        times, flags = (2, 1) if gradients else (1, 0)
        send, receive = (
            [times * n + flags * c for n, c in zip(route.numels, route.counts, strict=True)]
            for route in (plan.away, plan.own)
        )
        chunks = [self._sent(pieces, gradients) for pieces in _by_rank(plan.away)]
        sent = torch.cat([*chain(*chunks), self._like]).to(self._device)
        arrived = torch.empty(sum(receive), dtype=sent.dtype, device=sent.device)
        work = DONE
        if plan.total:
            with self._to_owners.exchange():
                work = self._group.all_to_all(
                    arrived, sent, receive, send, async_op=True, label="parameters for whole updates"
                )
        self._arriving = (plan, gradients, sent, arrived, work)

    def _sent(self, pieces: Sequence[Piece], gradients: bool) -> list[torch.Tensor]:
        parts = [self._parts[p.item] for p in pieces]
        chunks = [p.cut(shard_of(p)) for p in parts]
        if gradients:
            chunks += [_gradient(p) for p in parts]
            if parts:
                chunks.append(self._flags_of(tuple([p.may_have_gradient for p in parts])))
        return chunks

    def _flags_of(self, have: tuple[bool, ...]) -> torch.Tensor:
        if have not in self._flags:
            self._flags[have] = torch.tensor(have, dtype=self._like.dtype).to(self._like.device)
        return self._flags[have]

    def finish(self) -> None:
        if self._arriving is None:
            return
        plan, gradients, _, arrived, work = self._arriving
        with self._to_owners.exchange_wait():
            work.wait()
        arrived = arrived.to(self._like.device)
        self._arriving = None
        numels = [o.part.shape.numel() for o in self.owned]
        values = self._like.new_empty(sum(numels)).split(numels)
        places = dict(zip(self._by_number, values, strict=True))
        _copy(
            [(places[n].narrow(0, p.start, p.numel), v) for n, p, v in _arrived(plan, arrived, gradients, 0)]
        )
        self._take_own(values, [shard_of(o.part) for o in self.owned])
        for owned, value in zip(self.owned, values, strict=True):
            owned.param.grad = None  # a step that raised may have left one
            owned.param.data = value.view(owned.part.shape)
        if gradients:
            self._show_gradients(plan, arrived, numels)

    def _take_own(self, targets: Sequence[torch.Tensor], shards: Sequence[torch.Tensor]) -> None:
        _copy(
            [
                (target.narrow(0, o.part.here.start, o.part.here.numel), o.part.cut(shard))
                for target, o, shard in zip(targets, self.owned, shards, strict=True)
                if o.part.here is not None
            ]
        )

    def _show_gradients(self, plan: Plan, arrived: torch.Tensor, numels: list[int]) -> None:
        there = self._with_gradient(plan, arrived)
        gradients = self._like.new_empty(sum(n for n, t in zip(numels, there, strict=True) if t)).split(
            [n for n, t in zip(numels, there, strict=True) if t]
        )
        left = iter(gradients)
        shown = [next(left) if t else None for t in there]
        places = dict(zip(self._by_number, shown, strict=True))
        pairs = []
        for number, piece, value in _arrived(plan, arrived, True, 1):
            place = places[number]
            if place is not None:
                pairs.append((place.narrow(0, piece.start, piece.numel), value))
        for owned, place in zip(self.owned, shown, strict=True):
            if place is None:
                continue
            owned.param.grad = place.view(owned.part.shape)
            here = owned.part.here
            if here is not None:
                pairs.append((place.narrow(0, here.start, here.numel), _gradient(owned.part)))
        _copy(pairs)

    def _with_gradient(self, plan: Plan, arrived: torch.Tensor) -> list[bool]:
        """Which of the owned ones have a gradient. What came is read only where this rank can't know."""
        known = [
            o.part.trains if o.part.may_have_gradient else None if o.part.here is None else False
            for o in self.owned
        ]
        if None not in known:
            return [bool(k) for k in known]
        flags: dict[int, torch.Tensor] = {}
        for (number, _, _), flag in zip(
            _arrived(plan, arrived, True, 1), _flags_in(plan.own, arrived), strict=True
        ):
            flags.setdefault(number, flag)
        found = torch.stack([flags.get(n, arrived.new_zeros(())) for n in self._by_number]).tolist()
        return [bool(f) if k is None else k for k, f in zip(known, found, strict=True)]

    # ------------------------------------------------------------ back
    def send_back(self) -> None:
        plan = self._plan()
        values = {n: o.param.detach().reshape(-1) for n, o in self._by_number.items()}
        chunks = [values[p.item].narrow(0, p.start, p.numel) for _, p in plan.own.pieces]
        sent = torch.cat([*chunks, self._like]).to(self._device)
        arrived = torch.empty(sum(plan.away.numels), dtype=sent.dtype, device=sent.device)
        _copy(
            [
                (o.part.cut(shard_of(o.part)), values[n].narrow(0, o.part.here.start, o.part.here.numel))
                for n, o in self._by_number.items()
                if o.part.here is not None and o.part.trains
            ]
        )
        work = DONE
        if plan.total:
            with self._to_shards.exchange():
                work = self._group.all_to_all(
                    arrived,
                    sent,
                    plan.away.numels,
                    plan.own.numels,
                    async_op=True,
                    label="updated parameters",
                )
        self._arriving = (plan, False, sent, arrived, work)

    def take_back(self) -> None:
        if self._arriving is None:
            return
        plan, _, _, arrived, work = self._arriving
        with self._to_shards.exchange_wait():
            work.wait()
        arrived = arrived.to(self._like.device)
        self._arriving = None
        pieces = [p for _, p in plan.away.pieces]
        parts = [self._parts[p.item] for p in pieces]
        cut = arrived.split([p.numel for p in pieces])
        _copy([(part.cut(shard_of(part)), value) for part, value in zip(parts, cut, strict=False)])


def _gradient(part: Part) -> torch.Tensor:
    """The piece of the gradient here; what stands for none is not looked at."""
    shard = shard_of(part)
    gradient = None if part.flat is None else part.flat.param.grad
    return torch.zeros_like(part.cut(shard)) if gradient is None else part.cut(gradient)


def _by_rank(route: Route) -> list[list[Piece]]:
    ends = list(accumulate(route.counts, initial=0))
    return [[p for _, p in route.pieces[a:b]] for a, b in pairwise(ends)]


def _blocks(
    route: Route, arrived: torch.Tensor, times: int, flags: int
) -> Iterator[tuple[list[Piece], torch.Tensor]]:
    """What came from each rank, and the pieces that it is about."""
    sizes = [times * n + flags * c for n, c in zip(route.numels, route.counts, strict=True)]
    return zip(_by_rank(route), arrived.split(sizes), strict=True)


def _arrived(
    plan: Plan, arrived: torch.Tensor, gradients: bool, which: int
) -> Iterator[tuple[int, Piece, torch.Tensor]]:
    """Number, piece, and its values (``which`` 0) or its gradient (1), in the order of the route."""
    times, flags = (2, 1) if gradients else (1, 0)
    for pieces, block in _blocks(plan.own, arrived, times, flags):
        numel = sum(p.numel for p in pieces)
        cut = block.narrow(0, which * numel, numel).split([p.numel for p in pieces]) if pieces else ()
        for piece, value in zip(pieces, cut, strict=True):
            yield piece.item, piece, value


def _flags_in(route: Route, arrived: torch.Tensor) -> Iterator[torch.Tensor]:
    """One number for each piece, in the order of the route."""
    for pieces, block in _blocks(route, arrived, 2, 1):
        yield from block[block.numel() - len(pieces) :]


def _copy(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    if pairs:
        torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])
