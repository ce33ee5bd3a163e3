"""Optimizer state by names of parameters (as DCP and shardkit keep it) and by numbers (as torch's optimizers do)."""

from __future__ import annotations

from collections.abc import Mapping

from ...errors import ConfigurationError
from ...types import StateDict, Tree
from .stored import StoredTensor


def is_by_name(optimizer: StateDict) -> bool:
    """Whether param groups list names."""
    listed = [p for group in optimizer["param_groups"] for p in group.get("params", [])]
    return bool(listed) and all(isinstance(p, str) for p in listed)


def says_names(optimizer: StateDict) -> bool:
    """Whether param groups tell the name of each number, as those of an optimizer of named_parameters() do."""
    return all(len(g.get("param_names") or ()) == len(g["params"]) for g in optimizer["param_groups"])


def by_number(optimizer: StateDict) -> StateDict:
    """As ``Optimizer.state_dict()`` has it, and OSS's: a parameter's number is its place in all groups."""
    groups, numbers = [], dict[str, int]()
    for group in optimizer["param_groups"]:
        names = list(group.get("params", []))
        for name in names:
            numbers[name] = len(numbers)
        rest = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        groups.append({**rest, "params": [numbers[n] for n in names], "param_names": names})
    state = optimizer.get("state") or {}
    unknown = [name for name in state if name not in numbers]
    if unknown:
        raise ConfigurationError(
            f"the optimizer has a state of {unknown[0]!r}, which is in none of its param groups; pass --model-only to "
            "leave the optimizer out"
        )
    found = {numbers[name]: values for name, values in state.items()}
    return {**optimizer, "state": dict(sorted(found.items())), "param_groups": groups}


def by_name(optimizer: StateDict, model: Mapping[str, Tree], params: list[str]) -> StateDict | None:
    """The reverse. None where it is not certain which parameter a number is.

    Args:
        model: the model's state dict.
        params: names in it that are parameters, in its order.
    """
    groups = optimizer["param_groups"]
    numbers = [p for group in groups for p in group.get("params", [])]
    if says_names(optimizer):
        names = [name for group in groups for name in group["param_names"]]
    elif len(groups) == 1 and len(numbers) == len(params):
        names = params
    else:
        return None
    known = dict(zip(map(str, numbers), names, strict=True))
    if len(known) != len(numbers):
        return None
    state = {}
    for number, values in (optimizer.get("state") or {}).items():
        name = known.get(str(number))
        if name is None or not _fits(model.get(name), values):
            return None
        state[name] = values
    made = []
    for group in groups:
        rest = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        made.append({"params": [known[str(p)] for p in group["params"]], **rest})
    return {**optimizer, "state": state, "param_groups": made}


def _fits(param: Tree, values: Tree) -> bool:
    """Moments have their parameter's shape; counters are numbers."""
    if not isinstance(param, StoredTensor) or not isinstance(values, Mapping):
        return False
    shapes = {v.shape for v in values.values() if isinstance(v, StoredTensor) and v.numel > 1}
    return shapes <= {param.shape}
