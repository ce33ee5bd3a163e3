"""WholeParameters: any torch optimizer over sharded parameters, as exact as over whole ones.

Legend: W world size.

[Note: led steps] Some optimizers evaluate the model themselves, as often as they like (LBFGS). All of their parameters
have one owner, the leader, which runs the optimizer. The other ranks do what it asks for: take the values that it
tries, evaluate the closure with it, and send gradients.
"""

from __future__ import annotations

import copy
import enum
import fnmatch
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias, cast

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.optim import LBFGS, AdamW, Optimizer

from ...backend import Group, ReduceOp, not_compiled
from ...checks import attempt, check_same_everywhere, objects_of, option_facts, problems_of_ranks
from ...errors import ConfigurationError, LifecycleError, noting_errors
from ...fsdp.flat_param import FlatParam
from ...fsdp.optimizer_check import agree_on_step
from ...fsdp.state import state_of
from ...layout import Piece, buckets_by_size
from ...optimizer_state.kinds import (
    Slot,
    Span,
    check_form,
    check_same_state,
    check_state,
    is_elementwise,
    to_cpu,
)
from ...optimizers.elementwise import Maker, Verdict, couples_parameters, is_known_elementwise, judge
from ...optimizers.shards import AgreedOptions, copy_options, numbered, options_of
from ...progress import note_error
from ...types import Kwargs, ParamGroup, SavedState, StateDict, Tree
from .exchange import (
    Bringing,
    Bundle,
    Exchange,
    Gathered,
    Part,
    ShardInPlace,
    held_by_ranks,
    owners_of,
    parts_of,
    shards_of,
)

# ------------------------------------------------------------ which optimizer updates which parameters, and where
# In place, at their owners, or in whole shards.

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
            if (flat := part.flat) is None:
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
            if (flat := part.flat) is None:
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
            if inner.rule.kind is not UpdateKind.PIECES:
                self._fill(inner, places)

    def _fill(self, inner: Inner, places: dict[int, nn.Parameter]) -> None:
        """Gives a rule that needs whole parameters what it updates here, of these places and of what is not sharded."""
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
    made = build([nn.Parameter(torch.zeros((2,) * dim, device="cpu"))], **options)
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
    listed = {parts[k].name: parts[k].listed for k in members}
    integers = [name for name, p in listed.items() if not (p.is_floating_point() or p.is_complex())]
    if integers and isinstance(probe, LBFGS):
        raise ConfigurationError(f"LBFGS adds steps to {integers[0]!r}, which has integers: make it a buffer")
    kind, group = _kind(probe, lambda params: build(params, **options)), options_of(probe.param_groups[0])
    return Rule(build, options, tuple(members), kind, group, dict(probe.defaults), isinstance(probe, LBFGS))


def _kind(probe: Optimizer, make: Maker) -> UpdateKind:
    verdict = judge(probe, make)
    if verdict is Verdict.ELEMENTWISE:
        return UpdateKind.PIECES
    if isinstance(probe, LBFGS) or couples_parameters(probe, make):
        return UpdateKind.TOGETHER
    if verdict is Verdict.UNKNOWN:
        logger.warning(
            "%(name)s could not be tried, so it is taken to update parameters together: one rank has all of its state. "
            "If it updates every element by itself, say so: shardkit.declare_elementwise(%(name)s)",
            {"name": type(probe).__name__},
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


# ------------------------------------------------------------ the optimizer


class WholeParameters(Optimizer):
    """Runs optimizers on parameters that FSDP or ``fully_shard`` has sharded, with the numbers of one process.

    ::

        optimizer = WholeParameters(model, torch.optim.Muon, lr=0.02)       # matrices; AdamW takes the rest
        optimizer = WholeParameters(model, [
            ("embedding", torch.optim.AdamW, {"lr": 3e-4}),
            (lambda name, p: p.ndim == 2, torch.optim.Muon, {"lr": 0.02}),
        ], rest=(torch.optim.AdamW, {"lr": 3e-4, "weight_decay": 0.0}))

    An optimizer that updates every element by itself works on this rank's pieces, and nothing is sent. Any other has an
    owner for each parameter: before a step the pieces travel there, and after it the new values back, in one all-to-all
    each way for all parameters. Owners are balanced by cost. An optimizer that couples all of its parameters (LBFGS)
    has one owner for all.

    ``param_groups`` has one group for each rule, whose entries have the names (``param_names``), shapes and ``ndim`` of
    the model as it was written. Their ``grad`` is this rank's part.

    Args:
        model: with FSDP modules in it, or without any (then this is plain optimizers under one name).
        optimizer: a class, or rules in order: (filter or names, class, options). A filter takes a name and an entry of
            ``param_groups``; names are of parameters or modules, or patterns (``"layers.*.weight"``). The first rule
            that takes a parameter has it. A class alone has all parameters whose number of dimensions it accepts.
        rest: class and options for parameters that no rule takes; by default AdamW with its defaults.
        cost: of an optimizer class and a shape, what an update costs; by default known for Muon, Shampoo and SOAP, and
            the number of elements for others.
        **options: of a class alone.

    Raises:
        ConfigurationError: on all ranks; see docs/WHOLE_PARAMETERS.md for what is refused.
        RankMismatchError: ranks have other parameters, rules or options.

    Construction, :meth:`step`, :meth:`state_dict`, :meth:`load_state_dict`, :meth:`train` and :meth:`eval` are
    collectives: every rank calls them.
    """

    @noting_errors
    def __init__(
        self,
        model: nn.Module,
        optimizer: OptimizerClass | Sequence[GivenRule],
        *,
        rest: tuple[OptimizerClass, Kwargs] | None = None,
        cost: Cost = cost_of,
        **options: object,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise ConfigurationError(
                f"WholeParameters takes the model itself, and got a {type(model).__name__}"
            )
        self._parts = parts_of(model)
        rules = rules_for(self._parts, optimizer, dict(options), rest)
        replicas = [s.replicas for s in map(state_of, model.modules()) if s is not None]
        self._replicas = list({g.ranks: g for g in replicas if g is not None}.values())
        self._evaluates = len(rules) == 1 and rules[0].kind is UpdateKind.TOGETHER
        groups: list[ParamGroup] = [
            {**rule.group, "params": [(self._parts[n].name, self._parts[n].listed) for n in rule.members]}
            for rule in rules
        ]
        self._built = False
        super().__init__(groups, {})
        self._built = True
        self.defaults = dict(rules[0].defaults)
        self._groups = {f.group.ranks: f.group for f in shards_of(self._parts) if f.group.world_size > 1}
        self._check_agreement(rules)
        self._names = {ranks: numbered(group, "WholeParameters") for ranks, group in self._groups.items()}
        self._agreed = AgreedOptions()
        self._shown = 0  # parameters that have a state
        self._placing = Placing(self._parts, rules, cost)
        self._make_inners()

    def _check_agreement(self, rules: Sequence[Rule]) -> None:
        for group in self._groups.values():
            facts: list[tuple[str, object]] = []
            for index, rule in enumerate(rules):
                facts += option_facts(
                    **{f"optimizer of rule {index}": rule.label, f"kind of rule {index}": rule.kind.name}
                )
                facts += option_facts(**{f"{k} of rule {index}": rule.group[k] for k in sorted(rule.group)})
                facts += [(self._parts[n].name, (tuple(self._parts[n].shape), index)) for n in rule.members]
            check_same_everywhere(group, facts, "parameters or rules of WholeParameters")

    def _make_inners(self) -> None:
        """Makes them; a class that refuses a parameter does so on its owner alone: then all ranks raise."""
        _, problem = attempt(self._placing.make_optimizers)
        mine = None if problem is None else f"{type(problem).__name__}: {problem}"
        for group in self._groups.values():
            for rank, theirs in problems_of_ranks(group, mine, "check of optimizers"):
                raise ConfigurationError(
                    f"an optimizer can't be made over the parameters of rank {rank}: {theirs}"
                ) from problem
        if problem is not None:
            raise problem
        self._options_from_inners()

    def _agree(self, what: str) -> None:
        """Tells the ranks what is about to be done by which optimizer: another one of theirs would answer."""
        for ranks, group in self._groups.items():
            group.channel("parameters").agree(f"{what} of {self._names[ranks]}")

    def _before_step(self) -> None:
        """Refuses options, or gradients, that one rank has changed: each owner would update with its own."""
        flats = shards_of(self._parts)
        for ranks, group in self._groups.items():
            mine = [f for f in flats if f.group is group]
            self._agreed.check(group, self.param_groups)
            agree_on_step(
                [listing for f in mine for listing in f.listings],
                f"a step of {self._names[ranks]}",
                [f"parameter {p.name!r}" for p in self._parts if p.is_cleared and p.flat in mine],
            )
        for listing in [r for f in flats if f.unused.is_noted for r in f.listings if r.param.grad is None]:
            for k, _ in enumerate(listing.originals, listing.first):  # all ranks have cleared it
                listing.flat.unused.originals[k] = True

    def _changed(self) -> None:
        """Lets who keeps gathered values know that shards have others, which were written past their versions."""
        for flat in shards_of(self._parts):
            flat.unused.is_noted = False
            if flat.trains:
                increment_version(flat.versioned)

    # ------------------------------------------------------------ facts
    @property
    def optimizers(self) -> list[Optimizer | None]:
        """Returns the optimizer of each group on this rank; None where it has no parameter here."""
        return [inner.optimizer for inner in self._placing.inners]

    def owner_of(self, name: str) -> int | None:
        """Returns the rank, within its group, that updates a parameter; None if every rank updates its piece.

        Raises:
            ConfigurationError: no parameter has that name.
        """
        number = next((k for k, p in enumerate(self._parts) if p.name == name), None)
        if number is None:
            raise ConfigurationError(f"no parameter is called {name!r}")
        return self._placing.owners.get(number)

    def add_param_group(self, param_group: ParamGroup) -> None:
        """Refuses: all parameters of the model are in groups already.

        Raises:
            LifecycleError: always.
        """
        if self._built:
            raise LifecycleError(
                "WholeParameters has all parameters of the model from the beginning, frozen ones too: give rules for "
                "those that are unfrozen later when it is made, and call requires_grad_() on them"
            )
        super().add_param_group(param_group)

    # ------------------------------------------------------------ stepping
    @not_compiled
    @torch.no_grad()
    def step(self, closure: Callable[[], Tree] | None = None, **kwargs: object) -> Tree:  # type: ignore[override]
        """Updates all parameters (collective).

        Args:
            closure: reevaluates the model and returns the loss. It is called once, or, by an optimizer that couples all
                parameters, as often as that asks for it; every rank passes one.
            **kwargs: passed to the ``step`` of the optimizers.
        """
        try:
            self._before_step()
            self._options_to_inners()
            if closure is not None and self._evaluates:
                loss = self._led_step(closure, kwargs)
            else:
                loss = None
                if closure is not None:
                    with torch.enable_grad():
                        loss = closure()
                self._plain_step(kwargs)
            self._options_from_inners()
        except Exception as error:  # of an optimizer or the closure: noting_errors would cost calls
            note_error(error)
            raise
        return loss

    def _plain_step(self, kwargs: Kwargs) -> None:
        exchanges = self._placing.exchanges
        for exchange in exchanges:
            exchange.start(gradients=True)
        self._step_inners(kwargs, of_pieces=True)  # meanwhile
        for exchange in exchanges:
            exchange.finish()
        self._step_inners(kwargs, of_pieces=False)
        for exchange in exchanges:
            exchange.send_back()
        for exchange in exchanges:
            exchange.take_back()
            exchange.forget()
        self._changed()

    def _step_inners(self, kwargs: Kwargs, of_pieces: bool) -> None:
        for inner in self._placing.inners:
            if inner.optimizer is not None and (inner.rule.kind is UpdateKind.PIECES) is of_pieces:
                inner.optimizer.step(**kwargs)

    def _led_step(self, closure: Callable[[], Tree], kwargs: Kwargs) -> Tree:
        """Runs the optimizer on the leader, and what it asks for on the others; see [Note: led steps]."""
        optimizer = self._placing.inners[0].optimizer
        group = next(iter(self._groups.values()), None)
        control = None if group is None else group.channel("control")
        leader = next((rank for _, rank in self._placing.leaders.values()), None)
        losses: list[Tree] = []

        def evaluates(again: bool) -> bool:
            """Tells the other ranks whether the leader evaluates again, or hears it."""
            if leader is None or control is None:  # every rank runs the optimizer, with the same numbers
                return again
            return control.broadcast_object(again, leader, label="whether the optimizer evaluates again")

        def evaluate() -> Tree:
            self._to_shards()
            with torch.enable_grad():
                loss = closure()
            if isinstance(loss, torch.Tensor):
                loss = loss.detach().clone()
                # replicas follow leaders of their own, which have to see the same losses
                for ranks in ([] if control is None else [control]) + self._replicas:
                    ranks.all_reduce(loss, op=ReduceOp.AVG, label="loss of the closure")
            self._to_owners()
            losses.append(loss)
            return loss

        def evaluated() -> Tree:
            evaluates(True)
            return evaluate()

        if optimizer is None:
            self._to_owners()
            while evaluates(True):
                evaluate()
            self._to_shards()
            return losses[0] if losses else None
        try:
            self._to_owners()
            loss = optimizer.step(evaluated, **kwargs)
            evaluates(False)
            self._to_shards()
            return loss
        finally:
            for exchange in self._placing.exchanges:
                exchange.forget()

    def _to_owners(self, gradients: bool = True) -> None:
        for exchange in self._placing.exchanges:
            exchange.start(gradients)
            exchange.finish()

    def _to_shards(self) -> None:
        for exchange in self._placing.exchanges:
            exchange.send_back()
            exchange.take_back()
        self._changed()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients; every rank its part."""
        for flat in shards_of(self._parts):
            if set_to_none:
                flat.param.grad = None
            elif flat.param.grad is not None:
                flat.param.grad.zero_()
        for part in self._parts:
            gradient = part.listed.grad if part.flat is None else None
            if gradient is not None:
                if set_to_none:
                    part.listed.grad = None
                else:
                    gradient.detach_().zero_()

    # ------------------------------------------------------------ schedule-free optimizers
    def train(self) -> None:
        """Makes parameters what the next step needs, for optimizers that have this switch (schedule-free ones)."""
        self._switch("train")

    def eval(self) -> None:
        """Makes parameters what is evaluated and saved, for optimizers that have this switch (schedule-free ones)."""
        self._switch("eval")

    @noting_errors
    @torch.no_grad()
    def _switch(self, mode: str) -> None:
        self._agree(mode)
        self._options_to_inners()
        self._to_owners(gradients=False)
        for optimizer in self.optimizers:
            switch = getattr(optimizer, mode, None)
            if callable(switch):
                switch()
        self._to_shards()
        for exchange in self._placing.exchanges:
            exchange.forget()
        self._options_from_inners()

    # ------------------------------------------------------------ options and state
    def _options_to_inners(self) -> None:
        is_cleared = len(self.state) < self._shown  # or another object
        for inner, group in zip(self._placing.inners, self.param_groups, strict=True):
            if is_cleared:
                inner.forget_state(cast("dict[torch.Tensor, StateDict]", self.state))
            if inner.optimizer is not None:
                copy_options([group], inner.optimizer.param_groups)

    def _options_from_inners(self) -> None:
        state = cast("dict[torch.Tensor, StateDict]", self.state)
        for inner, group in zip(self._placing.inners, self.param_groups, strict=True):
            if inner.optimizer is None:
                continue
            copy_options(inner.optimizer.param_groups, [group])
            inner.show_state(state)
        self._shown = len(state)
        self._agreed.note(self.param_groups)

    @noting_errors
    def state_dict(self, recipient_rank: int = -1) -> StateDict:  # type: ignore[override]
        """Returns the whole state in torch's format, by the model's names, on the CPU (collective).

        It loads at any world size and wrapping, and into one process's optimizer. ``param_names`` in its groups are the
        names that the model was written with.

        Args:
            recipient_rank: the rank within the sharding group that wants it; others get no state. -1: all.
        """
        self._agree("state_dict")
        self._options_to_inners()
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        found = collect(self._placing.inners, self.param_groups, self._parts, self._groups, recipient_rank)
        for after in self._optimizer_state_dict_post_hooks.values():
            changed = after(self, found)
            found = found if changed is None else changed
        return found

    @noting_errors
    def load_state_dict(self, state_dict: StateDict) -> None:
        """Loads what :meth:`state_dict` returned at any world size, or a plain optimizer's (collective).

        Where the groups have names, parameters are found by them; else they have to be in the model's order.

        Raises:
            ConfigurationError: on all ranks, if it is of other parameters; nothing was loaded.
            RankMismatchError: ranks were given different state.
        """
        state_dict = dict(state_dict)
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        own = own_part(state_dict, self._placing.inners, self.param_groups, self._groups)
        self.take_states(*own)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def placed(self) -> list[Inner]:
        """Returns the optimizers of this rank, one for each group, with the groups' options."""
        self._options_to_inners()
        return self._placing.inners

    def take_states(self, states: Sequence[dict[int, StateDict]], options: Sequence[StateDict]) -> None:
        """Loads the state of what this rank's optimizers update, by index, and the options of all groups.

        Nothing is sent: every rank has read its part of one checkpoint.
        """
        for inner, group, state, given in zip(
            self._placing.inners, self.param_groups, states, options, strict=True
        ):
            group.update(given)
            if inner.optimizer is not None:
                packed = {**given, "params": list(range(len(inner.spans)))}
                inner.optimizer.load_state_dict({"state": state, "param_groups": [packed]})
        self.state.clear()
        for inner in self._placing.inners:
            inner.shown = 0
        self._options_from_inners()

    def __getstate__(self) -> StateDict:
        raise LifecycleError(
            "WholeParameters can't be copied or pickled: parts of its parameters are on other ranks. Save state_dict()"
        )


# ------------------------------------------------------------ state, from what each rank has to torch's whole form
# That is ``{"state": {index: {...}}, "param_groups": [{..., "params": [index, ...], "param_names": [...]}]}``, where
# the index counts parameters over all groups. What has one element for each of a piece's is put together; anything else
# is a parameter's as it is.
_AT_ONCE = 2**24  # elements of parameters whose state is sent together
_STATE_DICT = "state_dict of WholeParameters"


class PieceState(NamedTuple):
    """State of one parameter on one rank.

    Attributes:
        start, numel: of the piece that it is of.
        spread: what has one element for each of the piece's; None: the state is the whole parameter's.
    """

    start: int
    numel: int
    spread: frozenset[str] | None
    state: StateDict


# ------------------------------------------------------------ collecting
def collect(
    inners: Sequence[Inner],
    groups: Sequence[ParamGroup],
    parts: Sequence[Part],
    ranks: Mapping[tuple[int, ...], Group],
    recipient: int,
) -> StateDict:
    """Returns the whole form (collective)."""
    mine = _here(inners)
    order = [p for g in groups for p in g["params"]]
    part_of = {id(p.listed): p for p in parts}
    ordered = [part_of[id(listed)] for listed in order]
    index = {p.name: k for k, p in enumerate(ordered)}
    state: dict[int, StateDict] = {}
    by_group: dict[tuple[int, ...], list[Part]] = {}
    for part in ordered:
        by_group.setdefault(() if part.flat is None else part.flat.group.ranks, []).append(part)
    for key, own in by_group.items():
        group = ranks.get(key)
        for some in buckets_by_size([p.shape.numel() for p in own], _AT_ONCE):
            sent = {own[k].name: mine[own[k].name] for k in some if own[k].name in mine}
            everybody = [sent] if group is None else objects_of(group, sent, recipient, _STATE_DICT)
            for k in some if everybody is not None else ():
                there = [e[own[k].name] for e in everybody or () if own[k].name in e]
                if there:
                    state[index[own[k].name]] = _joined(there, own[k])
    options = _options(inners, groups, ranks)
    counted = iter(range(len(order)))
    packed = [
        {**opts, "params": [next(counted) for _ in g["params"]], "param_names": list(g["param_names"])}
        for opts, g in zip(options, groups, strict=True)
    ]
    return {"state": dict(sorted(state.items())), "param_groups": packed}


def _here(inners: Sequence[Inner]) -> dict[str, PieceState]:
    """Returns state on this rank by name, on the CPU."""
    found: dict[str, PieceState] = {}
    for inner in inners:
        if inner.optimizer is None:
            continue
        for param, spans in inner.spans.items():
            state = inner.optimizer.state.get(param)
            for part, piece in spans if state else ():
                flat = part.flat
                answers = flat is None or not flat.group.backend.even_shards_only or flat.group.rank == 0
                if piece is None and not answers:
                    continue  # all ranks have the same state of the whole parameter: the first one answers for it
                found[part.name] = _span(state or {}, param, piece)
    return found


def _span(state: SavedState, param: torch.Tensor, piece: Piece | None) -> PieceState:
    if piece is None:
        return PieceState(0, param.numel(), None, to_cpu(dict(state)))
    spread = frozenset(k for k, v in state.items() if is_elementwise(k, v, param.shape))
    first, end = piece.offset, piece.offset + piece.numel
    cut = {k: to_cpu(v.detach().reshape(-1)[first:end] if k in spread else v) for k, v in state.items()}
    return PieceState(piece.start, piece.numel, spread, cut)


def _joined(there: Sequence[PieceState], part: Part) -> StateDict:
    joined = dict(there[0].state)
    for key in there[0].spread or ():
        whole = joined[key].new_empty(part.shape.numel())
        for found in there:
            whole[found.start : found.start + found.numel] = found.state[key]
        joined[key] = whole.view(part.shape)
    return joined


def _options(
    inners: Sequence[Inner], groups: Sequence[ParamGroup], ranks: Mapping[tuple[int, ...], Group]
) -> list[StateDict]:
    """Takes options from ranks whose optimizer has parameters: some classes count steps there (collective)."""
    options = [copy.deepcopy(options_of(g)) for g in groups]
    for group in ranks.values():
        mine = [
            {k: to_cpu(v) for k, v in opts.items()} if inner.optimizer is not None else None
            for opts, inner in zip(options, inners, strict=True)
        ]
        everybody = group.channel("control").all_gather_object(mine, label=_STATE_DICT)
        for k, own in enumerate(options):
            options[k] = next((found for e in everybody if (found := e[k]) is not None), own)
    return options


# ------------------------------------------------------------ loading
def own_part(
    state_dict: StateDict,
    inners: Sequence[Inner],
    groups: Sequence[ParamGroup],
    ranks: Mapping[tuple[int, ...], Group],
) -> tuple[list[dict[int, StateDict]], list[StateDict]]:
    """Returns the state of what each optimizer here updates, by index, and each group's options (collective)."""
    problem: ConfigurationError | None = None
    by_name: dict[str, StateDict] = {}
    options: list[StateDict] = []
    try:
        by_name, options = _by_name(state_dict, groups)
        for inner in inners:
            there = [part for part in inner.members if isinstance(by_name.get(part.name), dict)]
            states = [(repr(part.name), part.shape, by_name[part.name]) for part in there]
            whole = {s[0][0].name: p for p, s in inner.spans.items() if s[0][1] is None}
            kept: Tree = {} if inner.optimizer is None else inner.optimizer.state
            own = [kept.get(whole.get(part.name), {}) for part in there]
            check_state(states, own, is_known_elementwise(inner.rule.build))
    except ConfigurationError as error:
        problem = error
    if not ranks and problem is not None:
        raise problem
    for everyone in ranks.values():
        check_same_state(everyone, state_dict, problem)
    found = [
        {
            index: copy.deepcopy(slot_of(param, spans).cut(by_name))
            for index, (param, spans) in enumerate(inner.spans.items())
            if any(by_name.get(part.name) for part, _ in spans)
        }
        for inner in inners
    ]
    return found, copy.deepcopy(options)


def _by_name(
    state_dict: StateDict, groups: Sequence[ParamGroup]
) -> tuple[dict[str, StateDict], list[StateDict]]:
    """Returns state by the model's names, and the options of each group."""
    check_form(state_dict)
    loaded = state_dict["param_groups"]
    named = all("param_names" in g for g in loaded)
    names = [n for g in groups for n in g["param_names"]]
    if not named:
        there, here = [len(g["params"]) for g in loaded], [len(g["param_names"]) for g in groups]
        if there != here:
            raise ConfigurationError(
                f"loaded state has {there} parameters in its groups and no names, this optimizer has {here}; save it "
                "from an optimizer over named_parameters(), or with the same groups"
            )
    theirs = [n for g in loaded for n in g["param_names"]] if named else names
    indices = [i for g in loaded for i in g["params"]]
    if sorted(theirs) != sorted(names):
        unknown, lacking = sorted(set(theirs) - set(names)), sorted(set(names) - set(theirs))
        raise ConfigurationError(
            f"loaded state is of other parameters: it lacks {lacking[:3]} and has {unknown[:3]} beside those of this "
            "optimizer; nothing was loaded"
        )
    state = {
        n: state_dict["state"][i] for n, i in zip(theirs, indices, strict=True) if i in state_dict["state"]
    }
    group_of = {n: k for k, g in enumerate(loaded) for n in (g["param_names"] if named else ())}
    own = [loaded[group_of[g["param_names"][0]] if named else k] for k, g in enumerate(groups)]
    return state, [options_of(g) for g in own]


def slot_of(
    param: torch.Tensor, spans: Sequence[tuple[Part, Piece | None]], copies: tuple[int, ...] = ()
) -> Slot:
    """Describes what a parameter of an inner optimizer stands for."""
    found = [Span(part.name, part.shape, piece, piece is None or piece.start == 0) for part, piece in spans]
    return Slot(param, tuple(found), spans[0][1] is not None, copies)
