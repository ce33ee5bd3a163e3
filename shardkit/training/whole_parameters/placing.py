"""Where the parameters of each rule are updated: in place, at their owners, or in whole shards."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.optim import Optimizer

from ...backend import Group
from ...errors import ConfigurationError
from ...fsdp.flat_param import FlatParam
from ...layout import Piece
from ...types import StateDict
from .exchange import Bringing, Bundle, Exchange, Gathered, ShardInPlace, held_by_ranks, owners_of
from .listed import Part
from .rules import Cost, Rule, UpdateKind

logger = logging.getLogger("shardkit")


@dataclass
class Inner:
    """The optimizer of one rule on this rank.

    Attributes:
        members: all of the rule's parameters, wherever they are updated.
        params: what it updates.
        spans: of each, the parts that lie in it: the part, and its piece; None for a whole part.
        optimizer: None if it has no parameters here.
        shown: how many states of it :meth:`show_state` has shown.
    """

    rule: Rule
    members: list[Part]
    params: list[nn.Parameter] = field(default_factory=list)
    spans: list[list[tuple[Part, Piece | None]]] = field(default_factory=list)
    optimizer: Optimizer | None = None
    shown: int = 0

    def add(self, param: nn.Parameter, spans: list[tuple[Part, Piece | None]]) -> None:
        self.params.append(param)
        self.spans.append(spans)

    def make(self) -> None:
        """Makes it, as its parameters have their values now."""
        if self.params:
            self.optimizer = self.rule.build([{"params": self.params}], **self.rule.options)

    def show_state(self, state: dict[torch.Tensor, StateDict]) -> None:
        """Lets a state by listed parameters have what this optimizer keeps of them."""
        if self.optimizer is None or len(self.optimizer.state) == self.shown:
            return
        for param, spans in zip(self.params, self.spans, strict=True):
            for part, _ in spans if param in self.optimizer.state else ():
                state[part.listed] = self.optimizer.state[param]
        self.shown = len(self.optimizer.state)

    def whole_states(self) -> dict[str, StateDict]:
        """Returns the state of the parameters that are updated here as a whole, by name."""
        if self.optimizer is None:
            return {}
        return {
            spans[0][0].name: self.optimizer.state.get(param, {})
            for param, spans in zip(self.params, self.spans, strict=True)
            if spans[0][1] is None
        }


class Placing:
    """Every parameter's place on this rank.

    Attributes:
        inners: one for each rule.
        in_place, exchanges: what shows these their values and gradients.
        leader: of a rule whose parameters have one owner, that rank within the group; by rule.
    """

    def __init__(self, parts: Sequence[Part], rules: Sequence[Rule], cost: Cost) -> None:
        self.inners = [Inner(rule, [parts[n] for n in rule.members]) for rule in rules]
        self.in_place: dict[int, ShardInPlace] = {}  # by id of the flat parameter
        self.exchanges: list[Bringing] = []
        self.leaders: dict[int, tuple[Group, int]] = {}
        self._parts = parts
        self._refuse_compiled(rules)
        for inner in self.inners:
            if inner.rule.kind is UpdateKind.PIECES:
                self._place_pieces(inner)
        self.owners = self._owners(rules, cost)
        self._place_whole()
        for shard in self.in_place.values():
            shard.lay_out()

    def make_optimizers(self) -> None:
        """Builds the inner optimizers, which may look at values (collective)."""
        for exchange in self.exchanges:
            exchange.start(gradients=False)
            exchange.finish()
        try:
            for inner in self.inners:
                inner.make()
        finally:
            for exchange in self.exchanges:
                exchange.forget()

    # ------------------------------------------------------------ pieces
    def _place_pieces(self, inner: Inner) -> None:
        shards: set[int] = set()
        for number in inner.rule.members:
            part = self._parts[number]
            flat = part.flat
            if flat is None:
                inner.add(part.listed, [(part, None)])
            elif _is_compiled(part):
                if id(flat) not in shards:
                    shards.add(id(flat))
                    inside = [p for p in self._parts if p.flat is flat]
                    inner.add(flat.param, [(p, p.here) for p in inside if p.here is not None])
            elif part.here is not None:
                param = self._in_place(flat).add(part, torch.Size([part.here.numel]))
                whole = Piece(part.here.item, part.here.start, part.here.rank, 0, part.here.numel)
                inner.add(param, [(part, whole)])

    def _in_place(self, flat: FlatParam) -> ShardInPlace:
        return self.in_place.setdefault(id(flat), ShardInPlace(flat))

    def _refuse_compiled(self, rules: Sequence[Rule]) -> None:
        """Refuses it where all ranks run one program: shards are updated as they are, by one optimizer each."""
        of_shard: dict[int, int] = {}
        for index, rule in enumerate(rules):
            for part in (p for p in (self._parts[n] for n in rule.members) if _is_compiled(p)):
                if of_shard.setdefault(id(part.flat), index) != index:
                    raise ConfigurationError(
                        f"{part.name!r} lies in a flat parameter with parameters of another rule, and where all ranks "
                        "run one program a flat parameter is updated as one. Use fully_shard, or wrap with "
                        "flatten=False"
                    )

    # ------------------------------------------------------------ whole parameters
    def _owners(self, rules: Sequence[Rule], cost: Cost) -> dict[int, int]:
        """Returns the owner of each whole sharded parameter, by its number, within its flat parameter's group."""
        bundles: dict[tuple[int, ...], list[tuple[float, list[int]]]] = {}
        groups: dict[tuple[int, ...], Group] = {}
        for index, rule in enumerate(rules):
            if rule.kind is UpdateKind.PIECES:
                continue
            together: list[int] = []
            for number in rule.members:
                flat = self._parts[number].flat
                if flat is None or flat.group.backend.even_shards_only:
                    continue
                together.append(number)
                groups[flat.group.ranks] = flat.group
                if rule.kind is UpdateKind.WHOLE:
                    bundles.setdefault(flat.group.ranks, []).append(
                        (self._cost(rule, number, cost), [number])
                    )
            if rule.kind is UpdateKind.TOGETHER and together:
                group = _only_group(rule, [self._parts[n] for n in rule.members])
                costs = sum(self._cost(rule, n, cost) for n in together)
                bundles.setdefault(group.ranks, []).append((costs, together))
                self.leaders[index] = (group, together[0])
        owners: dict[int, int] = {}
        for ranks, found in bundles.items():
            world = len(ranks)
            items = []
            for costs, numbers in found:
                pieces = [piece for n in numbers for piece in self._parts[n].pieces]
                items.append(Bundle(costs, held_by_ranks(pieces, world)))
            for (_, numbers), owner in zip(found, owners_of(items, world), strict=True):
                owners.update(dict.fromkeys(numbers, owner))
        self.leaders = {i: (group, owners[first]) for i, (group, first) in self.leaders.items()}
        return owners

    def _cost(self, rule: Rule, number: int, cost: Cost) -> float:
        part = self._parts[number]
        return float(cost(rule.build, part.shape)) if part.trains else 0.0

    def _place_whole(self) -> None:
        places: dict[int, nn.Parameter] = {}
        traveling: dict[tuple[object, ...], list[int]] = {}
        for number, owner in self.owners.items():
            part = self._parts[number]
            flat = part.flat
            if flat is None:
                continue
            if all(p.rank == owner for p in part.pieces) and part.pieces:
                if flat.group.rank == owner:
                    places[number] = self._in_place(flat).add(part, part.shape)
                continue
            key = (flat.group.ranks, flat.param.dtype, flat.param.device, flat.compute_device)
            traveling.setdefault(key, []).append(number)
        for _, found in sorted(traveling.items(), key=str):
            self._bring(self._exchange(sorted(found)), places)
        for inner in self.inners:
            if inner.rule.kind is UpdateKind.PIECES:
                continue
            compiled = [part for part in inner.members if _is_compiled(part)]
            if compiled:
                self._bring(Gathered(compiled), places)
                logger.warning(
                    "%s needs whole parameters, and all ranks run one program: each rank updates all of them, and "
                    "their state is not sharded",
                    inner.rule.label,
                )
            for number, part in zip(inner.rule.members, inner.members, strict=True):
                if part.flat is None:
                    inner.add(part.listed, [(part, None)])
                elif number in places:
                    inner.add(places[number], [(part, None)])

    def _exchange(self, numbers: Sequence[int]) -> Exchange:
        parts = [self._parts[n] for n in numbers]
        flat = next(p.flat for p in parts if p.flat is not None)
        owners = [self.owners[n] for n in numbers]
        return Exchange(flat.group.channel("gradients"), parts, owners, flat.compute_device)

    def _bring(self, bringing: Bringing, places: dict[int, nn.Parameter]) -> None:
        self.exchanges.append(bringing)
        number_of = {id(part): number for number, part in enumerate(self._parts)}
        places.update({number_of[id(owned.part)]: owned.param for owned in bringing.owned})


def _is_compiled(part: Part) -> bool:
    return part.flat is not None and part.flat.group.backend.even_shards_only


def _only_group(rule: Rule, parts: Sequence[Part]) -> Group:
    flats = [p.flat for p in parts]
    groups = {f.group.ranks: f.group for f in flats if f is not None}
    if None in flats or len(groups) > 1:
        raise ConfigurationError(
            f"{rule.label} updates parameters together, and some of them are sharded over other ranks than the others, "
            "or not at all: no rank can have all of them. Shard the whole model over one group"
        )
    (group,) = groups.values()
    return group
