"""Which optimizer updates which parameters, and where: in place, at their owners, or in whole shards."""

from __future__ import annotations

import enum
import fnmatch
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, cast

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from ...backend import Group
from ...errors import ConfigurationError, LifecycleError
from ...fsdp.flat_param import FlatParam
from ...layout import Piece
from ...optimizers.elementwise import Maker, Verdict, couples_parameters, judge
from ...types import Kwargs, ParamGroup, StateDict
from .exchange import Bringing, Bundle, Exchange, Gathered, ShardInPlace, held_by_ranks, owners_of
from .listed import Part

logger = logging.getLogger("shardkit")


@dataclass
class Inner:
    """The optimizer of one rule on this rank.

    Attributes:
        members: all of the rule's parameters, wherever they are updated.
        spans: what it updates, and of each the parts that lie in it: the part, and its piece; None for a whole part.
        optimizer: None if it has no parameters here.
        shown: how many states of it :meth:`show_state` has shown.
    """

    rule: Rule
    members: list[Part]
    spans: dict[nn.Parameter, list[tuple[Part, Piece | None]]] = field(default_factory=dict)
    optimizer: Optimizer | None = None
    shown: int = 0

    def show_state(self, state: dict[torch.Tensor, StateDict]) -> None:
        """Lets a state by listed parameters have what this optimizer keeps of them."""
        if self.optimizer is None or len(self.optimizer.state) == self.shown:
            return
        for param, spans in self.spans.items():
            for part, _ in spans if param in self.optimizer.state else ():
                state[part.listed] = self.optimizer.state[param]
        self.shown = len(self.optimizer.state)

    def forget_state(self, state: dict[torch.Tensor, StateDict]) -> None:
        """Begins anew with what a program has taken out of a state by listed parameters.

        Raises:
            LifecycleError: it has left the state of what is updated together with that.
        """
        for param, spans in self.spans.items():
            left = [part.name for part, _ in spans if part.listed in state]
            if self.optimizer is None or param not in self.optimizer.state or len(left) == len(spans):
                continue
            if left:
                raise LifecycleError(
                    f"state of WholeParameters was cleared, but not that of {left}, whose pieces on this rank are "
                    "updated together with what was cleared: clear the state of all parameters of the rule"
                )
            del self.optimizer.state[param]
        self.shown = -1

    def whole_states(self) -> dict[str, StateDict]:
        """Returns the state of the parameters that are updated here as a whole, by name."""
        if self.optimizer is None:
            return {}
        return {
            spans[0][0].name: self.optimizer.state.get(param, {})
            for param, spans in self.spans.items()
            if spans[0][1] is None
        }


class Placing:
    """Every parameter's place on this rank.

    Attributes:
        inners: one for each rule.
        exchanges: what shows these their values and gradients, what lies here first.
        leader: of a rule whose parameters have one owner, that rank within the group; by rule.
    """

    def __init__(self, parts: Sequence[Part], rules: Sequence[Rule], cost: Cost) -> None:
        self.inners = [Inner(rule, [parts[n] for n in rule.members]) for rule in rules]
        self._in_place: dict[int, ShardInPlace] = {}  # by id of the flat parameter
        self.exchanges: list[Bringing] = []
        self.leaders: dict[int, tuple[Group, int]] = {}
        self._parts = parts
        self._refuse_compiled(rules)
        for inner in self.inners:
            if inner.rule.kind is UpdateKind.PIECES:
                self._place_pieces(inner)
        self.owners = self._owners(rules, cost)
        self._place_whole()
        for shard in self._in_place.values():
            shard.lay_out()
        self.exchanges[:0] = self._in_place.values()

    def make_optimizers(self) -> None:
        """Builds the inner optimizers, which may look at values (collective)."""
        for exchange in self.exchanges:
            exchange.start(gradients=False)
            exchange.finish()
        try:
            for inner in self.inners:
                if inner.spans:
                    inner.optimizer = inner.rule.build([{"params": [*inner.spans]}], **inner.rule.options)
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
                inner.spans[part.listed] = [(part, None)]
            elif _is_compiled(part):
                if id(flat) not in shards:
                    shards.add(id(flat))
                    inside = [p for p in self._parts if p.flat is flat]
                    inner.spans[flat.param] = [(p, p.here) for p in inside if p.here is not None]
            elif part.here is not None:
                param = self._shard(flat).add(part, torch.Size([part.here.numel]))
                whole = Piece(part.here.item, part.here.start, part.here.rank, 0, part.here.numel)
                inner.spans[param] = [(part, whole)]

    def _shard(self, flat: FlatParam) -> ShardInPlace:
        return self._in_place.setdefault(id(flat), ShardInPlace(flat))

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
        for index, rule in enumerate(rules):
            if rule.kind is UpdateKind.PIECES:
                continue
            together: list[int] = []
            for number in rule.members:
                flat = self._parts[number].flat
                if flat is None or flat.group.backend.even_shards_only:
                    continue
                together.append(number)
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
        traveling: dict[tuple[object, ...], tuple[FlatParam, list[int]]] = {}
        for number, owner in self.owners.items():
            part = self._parts[number]
            flat = part.flat
            if flat is None:
                continue
            if all(p.rank == owner for p in part.pieces) and part.pieces:
                if flat.group.rank == owner:
                    places[number] = self._shard(flat).add(part, part.shape)
                continue
            key = (flat.group.ranks, flat.param.dtype, flat.param.device, flat.compute_device)
            traveling.setdefault(key, (flat, []))[1].append(number)
        for _, (flat, numbers) in sorted(traveling.items(), key=lambda item: str(item[0])):
            numbers.sort()
            parts, owners = [self._parts[n] for n in numbers], [self.owners[n] for n in numbers]
            channel = flat.group.channel("gradients")
            self._bring(Exchange(channel, parts, owners, flat.compute_device), places)
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
                    inner.spans[part.listed] = [(part, None)]
                elif number in places:
                    inner.spans[places[number]] = [(part, None)]

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


# ------------------------------------------------------------ rules, whether parameters are needed whole, and costs
Which: TypeAlias = Callable[[str, nn.Parameter], bool] | str | Iterable[str]
"""Takes a name and what ``param_groups`` list; or names, names of modules, or patterns (``"layers.*.weight"``)."""

OptimizerClass: TypeAlias = Callable[..., Optimizer]
GivenRule: TypeAlias = tuple[Which, OptimizerClass, Kwargs]


class UpdateKind(enum.Enum):
    PIECES = "nothing but the elements themselves"
    WHOLE = "a whole parameter"
    TOGETHER = "all of its parameters"


@dataclass(frozen=True)
class Rule:
    """One optimizer and its parameters.

    Attributes:
        options: what it is made with.
        members: numbers of its parameters among those of the model.
        kind: what an update needs.
        group: the options of its param group, as the class completes them.
        defaults: the optimizer's.
        evaluates: calls the closure of a step as often as it likes.
    """

    build: OptimizerClass
    options: Kwargs
    members: tuple[int, ...]
    kind: UpdateKind
    group: ParamGroup
    defaults: Kwargs
    evaluates: bool

    @property
    def label(self) -> str:
        return str(getattr(self.build, "__name__", self.build))


def rules_for(
    parts: Sequence[Part],
    optimizer: OptimizerClass | Sequence[GivenRule],
    options: Kwargs,
    rest: tuple[OptimizerClass, Kwargs] | None,
) -> list[Rule]:
    """Returns rules that have parameters, each parameter in one of them."""
    given = [] if callable(optimizer) else _checked(optimizer, options)
    if callable(optimizer):
        refuse_objects(optimizer)
        dims = {len(p.shape) for p in parts}
        accepted = _accepted_dimensions(optimizer, options, dims)
        given = [(lambda _, p: p.ndim in accepted, optimizer, options)]
    taken: list[list[int]] = [[] for _ in given]
    left: list[int] = []
    choose = [_chooser(which, parts) for which, _, _ in given]
    for number, part in enumerate(parts):
        first = next((k for k, takes in enumerate(choose) if takes(part.name, part.listed)), None)
        (left if first is None else taken[first]).append(number)
    found = [
        _rule(build, opts, members, parts)
        for (_, build, opts), members in zip(given, taken, strict=True)
        if members
    ]
    if left:
        build, opts = (AdamW, {}) if rest is None else rest
        refuse_objects(build)
        found.append(_rule(build, dict(opts), left, parts))
        names = [parts[k].name for k in left]
        logger.info(
            "%s updates %d parameters that no other rule takes (%s)",
            found[-1].label,
            len(left),
            ", ".join(names[:5]),
        )
    leading = [rule.label for rule in found if rule.evaluates]
    if leading and len(found) > 1:
        raise ConfigurationError(
            f"{leading[0]} evaluates the model by itself, and can't step together with others "
            f"({', '.join(r.label for r in found if r.label != leading[0])}): give it all parameters"
        )
    return found


def _checked(rules: object, options: Kwargs) -> list[GivenRule]:
    if isinstance(rules, Optimizer):
        refuse_objects(rules)
    found = (
        [tuple(rule) for rule in cast("Iterable[Sequence]", rules)] if isinstance(rules, list | tuple) else []
    )
    if not found or any(len(rule) != 3 or not callable(rule[1]) for rule in found) or options:
        raise ConfigurationError(
            "WholeParameters takes an optimizer class and its arguments, (model, torch.optim.Muon, lr=0.02), or a list "
            'of (filter or names, class, options), (model, [("layers", torch.optim.Muon, {"lr": 0.02})]), where all '
            f"options stand in the list; got {rules!r}" + (f" and {sorted(options)}" if options else "")
        )
    for _, build, _ in found:
        refuse_objects(build)
    return [(which, build, dict(opts)) for which, build, opts in found]


def refuse_objects(optimizer: object) -> None:
    """Raises ConfigurationError for an optimizer that was made already, and for what is none."""
    if isinstance(optimizer, Optimizer):
        name = type(optimizer).__name__
        raise ConfigurationError(
            f"this {name} was made already; pass its class: WholeParameters(model, {name}, lr=...)"
        )
    if isinstance(optimizer, type) and not issubclass(optimizer, Optimizer):
        raise ConfigurationError(f"{optimizer.__name__} is no torch.optim.Optimizer")


def _chooser(which: Which, parts: Sequence[Part]) -> Callable[[str, nn.Parameter], bool]:
    if callable(which):
        return which
    patterns = [which] if isinstance(which, str) else list(which)
    for pattern in patterns:
        if not any(_matches(pattern, part.name) for part in parts):
            raise ConfigurationError(
                f"no parameter is called or lies in {pattern!r}; there are {', '.join(p.name for p in parts[:8])}, ..."
            )
    return lambda name, _: any(_matches(pattern, name) for pattern in patterns)


def _matches(pattern: str, name: str) -> bool:
    return name == pattern or name.startswith(f"{pattern}.") or fnmatch.fnmatchcase(name, pattern)


# ------------------------------------------------------------ trying the class
def _probe(build: OptimizerClass, options: Kwargs, dim: int) -> Optimizer:
    """Returns an optimizer of the class over one small parameter."""
    made = build([nn.Parameter(torch.zeros((2,) * dim))], **options)
    if not isinstance(made, Optimizer):
        raise ConfigurationError(
            f"{build!r} returned {type(made).__name__}; it has to return a torch.optim.Optimizer"
        )
    return made


def _accepted_dimensions(build: OptimizerClass, options: Kwargs, dims: set[int]) -> set[int]:
    """Returns the numbers of dimensions that parameters of the class may have: Muon takes matrices."""
    accepted: set[int] = set()
    problem: Exception | None = None
    for dim in sorted(dims, reverse=True):
        try:
            _probe(build, options, dim)
        except ValueError as error:
            problem = error
        else:
            accepted.add(dim)
    if not accepted and problem is not None:
        raise problem
    return accepted


def _rule(build: OptimizerClass, options: Kwargs, members: Sequence[int], parts: Sequence[Part]) -> Rule:
    """Returns the rule; what its class needs is found out by trying it."""
    probe = _probe(build, options, len(parts[members[0]].shape))
    group = {k: v for k, v in probe.param_groups[0].items() if k not in ("params", "param_names")}
    kind = _kind(probe, lambda params: build(params, **options))
    return Rule(build, options, tuple(members), kind, group, dict(probe.defaults), _evaluates(probe))


def _evaluates(probe: Optimizer) -> bool:
    return isinstance(probe, torch.optim.LBFGS)


def _kind(probe: Optimizer, make: Maker) -> UpdateKind:
    verdict = judge(probe, make)
    if verdict is Verdict.ELEMENTWISE:
        return UpdateKind.PIECES
    if _evaluates(probe) or couples_parameters(probe, make):
        return UpdateKind.TOGETHER
    if verdict is Verdict.UNKNOWN:
        logger.warning(
            "%s could not be tried, so it is taken to update parameters together: one rank has all of its state. If it "
            "updates every element by itself, say so: shardkit.declare_elementwise(%s)",
            type(probe).__name__,
            type(probe).__name__,
        )
        return UpdateKind.TOGETHER
    return UpdateKind.WHOLE


Cost = Callable[[object, torch.Size], float]
"""Of an optimizer class and a parameter's shape."""


def cost_of(optimizer_class: object, shape: torch.Size) -> float:
    """Multiplications of a step, roughly, by the name of the class: classes of this kind are in many packages."""
    name = getattr(optimizer_class, "__name__", "").lower()
    numel = float(shape.numel())
    if len(shape) < 2:
        return numel
    if "muon" in name:  # Newton-Schulz iterations: products of [m, n] with [n, m], and of [m, m]
        rows, columns = shape[0], shape.numel() // max(1, shape[0])
        return min(rows, columns) ** 2 * float(max(rows, columns))
    if "shampoo" in name or "soap" in name or "kron" in name:  # roots or eigenvectors for each dimension
        return float(sum(n**3 for n in shape)) + numel * math.fsum(shape)
    return numel
