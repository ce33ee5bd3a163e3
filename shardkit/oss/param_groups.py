"""The param groups of an optimizer: their options, and that all ranks have the same."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import nn
from torch.optim import Optimizer

from ..backend import Group
from ..checks.same_everywhere import (
    check_same_everywhere,
    option_facts,
    refuse_differences,
    refuse_lazy,
    shape_fact,
)
from ..types import Facts, ParamGroup, StateDict, Tree

_WHAT = "the optimizer's parameters or options"


def options_of(group: ParamGroup) -> StateDict:
    """What a group says of its parameters."""
    return {k: v for k, v in group.items() if k != "params" and k != "param_names"}


def names_of(params: Sequence[nn.Parameter], group: ParamGroup) -> StateDict:
    """The entry for names of some parameters, if the group that they are from has names; stand-ins have none."""
    names = dict(zip(map(id, group["params"]), group.get("param_names", ()), strict=False))
    if not names or any(id(p) not in names for p in params):
        return {}
    return {"param_names": [names[id(p)] for p in params]}


def copy_options(source: list[ParamGroup], target: list[ParamGroup]) -> None:
    """Groups of one optimizer get the options of another's."""
    for a, b in zip(source, target, strict=True):
        b.update({k: v for k, v in a.items() if k != "params" and k != "param_names"})


def keep_groups(optimizer: Optimizer, groups: list[ParamGroup]) -> None:
    """Torch's loading makes other dicts; schedulers and trainers that hold these see what was loaded."""
    for group, loaded in zip(groups, optimizer.param_groups, strict=True):
        group.clear()
        group.update(loaded)
    optimizer.param_groups = groups


def group_facts(groups: Sequence[ParamGroup], first: int) -> list[tuple[str, object]]:
    """Options of the param groups from this one on; later they are the user's to change."""
    facts = []
    for index, group in enumerate(groups[first:], first):
        options = options_of(group)
        facts += option_facts(**{f"{k} of group {index}": options[k] for k in sorted(options)})
    return facts


def check_options_agree(group: Group, told: list[Tree], own: Collection[str]) -> None:
    """Raises RankMismatchError unless all ranks have the same options of their groups, but for an optimizer's ``own``.

    Args:
        group: the ranks.
        told: :func:`group_facts` of each, from the first group on.
        own: names of arguments that its class takes and no group knows: what they are for, and whether ranks pass the
            same, is the class's business.
    """
    compared = [[[name, value] for name, value in facts if name.split()[1] not in own] for facts in told]
    refuse_differences(group, compared, _WHAT)


def check_ranks_agree(
    group: Group, groups: Sequence[ParamGroup], options: Facts = (), aside: Tree = None
) -> list[Tree]:
    """Raises RankMismatchError unless all ranks have the same parameters and options (collective).

    Returns:
        What each rank tells ``aside``, which is not compared.
    """
    facts: list[tuple[str, object]] = [("number of param groups", len(groups))]
    for index, g in enumerate(groups):
        names = g.get("param_names") or [f"parameter {i} of group {index}" for i in range(len(g["params"]))]
        facts += [
            (n, (shape_fact(p), str(p.dtype), "trainable" if p.requires_grad else "frozen"))
            for n, p in zip(names, g["params"], strict=True)
        ]
    told = check_same_everywhere(group, [*facts, *options], _WHAT, aside)
    refuse_lazy(facts, "OSS")
    return told
