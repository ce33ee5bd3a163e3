"""The param groups of an optimizer: their options, and that all ranks have the same."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.optim import Optimizer

from ..backend import Group
from ..checks.same_everywhere import check_same_everywhere, options_of, refuse_lazy, shape_fact
from ..types import Facts, ParamGroup, StateDict


def names_of(params: Sequence[nn.Parameter], group: ParamGroup) -> StateDict:
    """The entry for names of some parameters, if the group that they are from has names; stand-ins have none."""
    names = dict(zip(map(id, group["params"]), group.get("param_names", ()), strict=False))
    if not names or any(id(p) not in names for p in params):
        return {}
    return {"param_names": [names[id(p)] for p in params]}


def copy_options(source: list[ParamGroup], target: list[ParamGroup]) -> None:
    """Groups of one optimizer get the options of another's."""
    for a, b in zip(source, target, strict=True):
        b.update(options_of(a))


def keep_groups(optimizer: Optimizer, groups: list[ParamGroup]) -> None:
    """Torch's loading makes other dicts; schedulers and trainers that hold these see what was loaded."""
    for group, loaded in zip(groups, optimizer.param_groups, strict=True):
        group.clear()
        group.update(loaded)
    optimizer.param_groups = groups


def check_ranks_agree(group: Group, groups: Sequence[ParamGroup], options: Facts = ()) -> None:
    """Raises RankMismatchError unless all ranks have the same parameters and options (collective)."""
    facts: list[tuple[str, object]] = [("number of param groups", len(groups))]
    for index, g in enumerate(groups):
        names = g.get("param_names") or [f"parameter {i} of group {index}" for i in range(len(g["params"]))]
        facts += [
            (n, (shape_fact(p), str(p.dtype), "trainable" if p.requires_grad else "frozen"))
            for n, p in zip(names, g["params"], strict=True)
        ]
    check_same_everywhere(group, [*facts, *options], "the optimizer's parameters or options")
    refuse_lazy(facts, "OSS")
