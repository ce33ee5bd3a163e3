"""Which optimizer updates which parameters, whether it needs them whole, and what an update costs."""

from __future__ import annotations

import enum
import fnmatch
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias, cast

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from ...errors import ConfigurationError
from ...optimizers.elementwise import Maker, Verdict, couples_parameters, judge
from ...types import Kwargs, ParamGroup
from .listed import Part

logger = logging.getLogger("shardkit")

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
