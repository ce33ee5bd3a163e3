"""Names, shapes and options that have to be the same on all ranks, compared before they do harm."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterable, Sequence
from operator import attrgetter
from types import BuiltinFunctionType, FunctionType, MethodType

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ..backend import Group
from ..errors import ConfigurationError, RankMismatchError
from ..types import Facts, ParamGroup, StateDict, Tree
from .facts import all_gather_facts

_grad_of = attrgetter("grad")


def check_same_everywhere(group: Group, facts: Facts, what: str, aside: Tree = None) -> list[Tree]:
    """Compares a list of (name, value) facts between ranks; raises on all of them at the first difference.

    Args:
        group: the ranks.
        facts: to be compared.
        what: they are of, for messages.
        aside: more facts, which are told in the same exchange and not compared.

    Returns:
        What each rank told aside.

    Raises:
        RankMismatchError: names the first differing fact and each rank's value.
    """
    if group.world_size == 1:
        return [aside]
    # as one text: ranks mostly tell the same, and then nobody takes it apart
    mine = json.dumps([(name, str(value)) for name, value in facts])
    told = all_gather_facts(group.channel("control"), (mine, aside), label=f"check of {what}")
    if any(theirs != mine for theirs, _ in told):
        _refuse_differences(group, [json.loads(theirs) for theirs, _ in told], what)
    return [beside for _, beside in told]


def _refuse_differences(group: Group, everybody: list[Tree], what: str) -> None:
    reference = everybody[0]
    for rank, other in enumerate(everybody):
        if other == reference:
            continue
        for i in range(max(len(reference), len(other))):
            mine = reference[i] if i < len(reference) else ("nothing", "-")
            theirs = other[i] if i < len(other) else ("nothing", "-")
            if mine != theirs:
                remedy = "Build the same model in the same order on every rank"
                if _OPTION in (mine[0].partition(" ")[0], theirs[0].partition(" ")[0]):
                    remedy = "Pass the same options on every rank"
                    if "optimizer" in what:
                        remedy += (
                            "; what a class of yours has for each rank, by functools.partial(Class, name=...)"
                        )
                raise RankMismatchError(
                    f"{what} differ between ranks: at position {i} rank {group.ranks[0]} has {mine[0]} "
                    f"{mine[1]}, rank {group.ranks[rank]} has {theirs[0]} {theirs[1]}. {remedy} (this rank is "
                    f"{group.ranks[group.rank]})."
                )


def shape_fact(tensor: torch.Tensor) -> object:
    """A shape as a fact for :func:`check_same_everywhere`; lazy modules have none before their first forward."""
    return "no shape yet" if is_lazy(tensor) else tuple(tensor.shape)


def refuse_lazy(facts: Facts, what: str) -> None:
    """Raises ConfigurationError if one of these facts, alike on all ranks, is a tensor without a shape."""
    lazy = [n for n, value in facts if isinstance(value, tuple) and value[0] == "no shape yet"]
    if lazy:
        raise ConfigurationError(
            f"{what} was given {', '.join(lazy[:3])}{', ...' if len(lazy) > 3 else ''}, which have no shape before "
            "their module's first forward (lazy modules). Run one forward on example inputs, alike on all ranks, first"
        )


_OPTION = "option"


def option_facts(**options: object) -> list[tuple[str, object]]:
    """Options as facts for :func:`check_same_everywhere`, in text; those of a dataclass one by one."""
    facts: list[tuple[str, object]] = []
    for name, value in options.items():
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            parts = {f"{name}.{f.name}": getattr(value, f.name) for f in dataclasses.fields(value)}
            facts += option_facts(**parts)
        else:
            facts.append((f"{_OPTION} {name}", _in_words(value)))
    return facts


def options_of(group: ParamGroup) -> StateDict:
    """What a group says of its parameters."""
    return {k: v for k, v in group.items() if k != "params" and k != "param_names"}


def copy_options(source: list[ParamGroup], target: list[ParamGroup]) -> None:
    """Groups of one optimizer get the options of another's."""
    for a, b in zip(source, target, strict=True):
        b.update(options_of(a))


def group_facts(groups: Sequence[ParamGroup], first: int) -> list[tuple[str, object]]:
    """Options of the param groups from this one on."""
    facts = []
    for index, group in enumerate(groups[first:], first):
        options = options_of(group)
        facts += option_facts(**{f"{k} of group {index}": options[k] for k in sorted(options)})
    return facts


def _in_words(value: object) -> str:
    """A value as text that is the same on all ranks if the value is."""
    if isinstance(value, torch.Tensor):
        return str(value.tolist()) if value.device.type == "cpu" else f"a tensor {tuple(value.shape)}"
    if isinstance(value, tuple | list):
        return f"({', '.join([_in_words(v) for v in value])})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{k}: {_in_words(v)}' for k, v in value.items())}}}"
    if value is None or isinstance(value, bool | int | float | str | torch.dtype):
        return str(value)
    plain = value.func if isinstance(value, functools.partial) else value
    kind = plain if isinstance(plain, type | FunctionType | BuiltinFunctionType | MethodType) else type(plain)
    return f"{kind.__module__}.{kind.__qualname__}"


class AgreedOptions:
    """Options of an optimizer's param groups, which are the same on all ranks: told when they change.

    To compare them in each step would take a collective. So a rank on which something has changed since its last step
    says what; the others say the same before they step, or are found to be in another call.
    """

    def __init__(self) -> None:
        self._known: list[StateDict] | None = None

    def note(self, groups: Sequence[ParamGroup]) -> None:
        """These are the same everywhere: all ranks have compared them, or come from a step that they made together."""
        self._known = _snapshot(groups)

    def check(self, group: Group, groups: Sequence[ParamGroup]) -> None:
        """Before a step.

        Raises:
            OutOfStepError: another rank steps with other options.
        """
        now, known = _snapshot(groups), self._known
        if known is None or now == known or group.world_size == 1:
            return
        self._known = now
        changed = [
            f"{key} of group {index} {_in_words(groups[index][key])}"
            for index, new in enumerate(now)
            for key, value in new.items()
            if index >= len(known) or key not in known[index] or known[index][key] != value
        ]
        group.agree(f"a step with other options than before: {', '.join(changed)}")


class AgreedGradients:
    """Which parameters have a gradient in a step, the same on all ranks that hold all gradients: told when it changes.

    Nothing is asked of ranks that keep the gradients of what they own alone.
    """

    def __init__(self) -> None:
        self._there: list[bool] | None = None
        self._are_whole = True

    def check(self, group: Group, params: Sequence[nn.Parameter], owned: Sequence[bool]) -> None:
        """Before a step, of whose gradients nothing else is known.

        Args:
            group: the ranks.
            params: all of them.
            owned: which of them this rank updates.

        Raises:
            OutOfStepError: another rank has other gradients.
        """
        there = [g is not None for g in map(_grad_of, params)]
        if there == self._there or group.world_size == 1:
            return
        before, self._there = self._there, there
        if not group.backend.even_shards_only and (before is None or len(before) != len(there)):
            others = [has for has, mine in zip(there, owned, strict=True) if not mine]
            keeps_own = any(there) and bool(others) and not any(others)
            told = all_gather_facts(
                group.channel("control"), keeps_own, label="the first gradients of an OSS"
            )
            self._are_whole = not any(told)
        if self._are_whole:
            without = [str(k) for k, has in enumerate(there) if not has]
            which = f"without those of parameters {', '.join(without)}" if without else "all"
            group.channel("parameters").agree(f"a step with gradients: {which}")


def _snapshot(groups: Sequence[ParamGroup]) -> list[StateDict]:
    """Options, with what tells of a change in place of tensors: to read one could wait for a device."""
    return [
        {k: (id(v), v._version) if isinstance(v, torch.Tensor) else v for k, v in options_of(group).items()}
        for group in groups
    ]


def check_one_device(params: Iterable[nn.Parameter]) -> None:
    """Raises ConfigurationError unless all parameters are on one device."""
    devices = sorted({str(p.device) for p in params})
    if len(devices) > 1:
        raise ConfigurationError(
            f"the parameters are on several devices: {', '.join(devices)}. Move the module to one device before "
            "sharding it; a model spread over devices needs one optimizer for each."
        )
