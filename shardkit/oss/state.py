"""Optimizer state between its sharded form (each owner its own) and torch's whole form.

The whole form is torch's: ``{"state": {global index: {...}}, "param_groups": [...]}`` where the index counts
parameters over all groups. Per-parameter tensors have the parameter's shape; ``step`` is a 0-dim tensor.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import cast

import torch
from torch import nn
from torch.optim import Optimizer

from ..checks import objects_of
from ..errors import ConfigurationError
from ..optimizer_state.kinds import check_state, to_cpu
from ..types import ParamGroup, StateDict, Tree
from .placement import Placement

State = StateDict


def collect(
    placement: Placement, optimizer: Optimizer, params: Iterable[nn.Parameter], recipient_rank: int
) -> dict[int, State] | None:
    """The state of all parameters by global index, as CPU tensors, on the recipient (-1: everywhere); None elsewhere
    (collective).

    Args:
        placement: has the ranks; their channel for small things is used unless it knows a better way.
        params: all, in the order of their indices.
    """
    index, group = {p: i for i, p in enumerate(params)}, placement.group
    is_kept = recipient_rank in (-1, group.rank)
    everybody: list[dict[int, State]] | None
    found = placement.state_of_all(optimizer, is_kept)
    if found is not None:
        everybody = [{index[p]: to_cpu(s) for p, s in found.items()}] if is_kept else None
    else:
        mine = {index[p]: to_cpu(s) for p, s in placement.state_of_owned(optimizer).items()}
        everybody = objects_of(group, mine, recipient_rank, f"consolidate_state_dict of {placement.name}")
    if everybody is None:
        return None
    merged = {i: s for part in everybody for i, s in part.items()}
    return dict(sorted(merged.items()))


def check_loadable(state_dict: StateDict, groups: list[ParamGroup]) -> None:
    """Raises ConfigurationError (a ValueError) unless the dict has the groups and parameters of this optimizer."""
    if not isinstance(state_dict, dict) or not {"state", "param_groups"} <= set(state_dict):
        raise ConfigurationError(
            "this is no optimizer state: expected a dict with 'state' and 'param_groups', as consolidate_state_dict() "
            "and state_dict() give it"
        )
    saved = [len(g["params"]) for g in state_dict["param_groups"]]
    mine = [len(g["params"]) for g in groups]
    if saved != mine:
        raise ConfigurationError(
            f"loaded state dict has parameters per group {saved}, this optimizer has {mine}; build it over the same "
            "param groups first"
        )


def check_shapes(
    state_dict: State, params: Sequence[nn.Parameter], own: Mapping[torch.Tensor, State], is_elementwise: bool
) -> None:
    """Raises ConfigurationError if the state of any parameter, of whatever owner, has another shape.

    Args:
        params: what they are here.
        own: the state that this rank's optimizer has of some of them.
        is_elementwise: see :func:`~shardkit.optimizer_state.kinds.check_state`.
    """
    states, mine = [], []
    for position, (i, p) in enumerate(zip(_indices(state_dict), params, strict=True)):
        found = state_dict["state"].get(i)
        if isinstance(found, dict):
            states.append((f"{position} (shape {tuple(p.shape)})", p.shape, found))
            mine.append(own.get(p, {}))
    check_state(states, mine, is_elementwise)


def selected(state_dict: State, kept: Sequence[nn.Parameter | None]) -> State:
    """Returns the same dict with copies of the state of some parameters only; the caller's is not touched.

    Args:
        kept: all parameters in order, None in the place of those whose state is not wanted.
    """
    device = {i: p.device for i, p in zip(_indices(state_dict), kept, strict=True) if p is not None}
    state = {i: _own_copies(s, device[i]) for i, s in state_dict["state"].items() if i in device}
    return {**state_dict, "state": state}


def as_loaded(
    optimizer: Optimizer, state_dict: State, dtype_of: Callable[[nn.Parameter], torch.dtype] | None
) -> dict[nn.Parameter, State]:
    """Returns the state that an optimizer has just loaded, by parameter.

    Args:
        optimizer: which has cast it to the parameters' dtypes.
        state_dict: what it was.
        dtype_of: what it is wanted in instead, if they are updated in another dtype.
    """
    taken: Tree = optimizer.state
    if dtype_of is None:
        return cast("dict[nn.Parameter, State]", taken)
    params = [p for g in optimizer.param_groups for p in g["params"]]
    saved = {p: state_dict["state"].get(i) for i, p in zip(_indices(state_dict), params, strict=True)}

    def is_cast(key: str, value: object) -> bool:  # by torch, to the dtype of the parameter
        return isinstance(value, torch.Tensor) and value.is_floating_point() and key != "step"

    return {
        p: {k: v.to(p.device, dtype_of(p)) if is_cast(k, v) else taken[p][k] for k, v in state.items()}
        for p, state in saved.items()
        if state
    }


def _indices(state_dict: State) -> list[int]:
    return [i for g in state_dict["param_groups"] for i in g["params"]]


def _own_copies(value: object, device: torch.device) -> Tree:
    """Copies tensors that would go on being shared with the caller: those that need no move to the device."""
    if isinstance(value, torch.Tensor):
        return value.clone() if value.device == device or value.dim() == 0 else value
    if isinstance(value, dict):
        return {k: _own_copies(v, device) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_own_copies(v, device) for v in value)
    return copy.copy(value)


def local(optimizer: Optimizer) -> State:
    """Returns the inner optimizer's dict. Looking up ``state[param]`` leaves an entry, of others' parameters too."""
    state: Tree = optimizer.state
    for p in [p for p, s in state.items() if isinstance(s, dict) and not s]:
        del state[p]
    return optimizer.state_dict()


def part_of_rank(state_dict: State, owners: Sequence[int], rank: int) -> State:
    """Returns the part of a whole state dict that belongs to one rank, with that rank's own indices.

    Args:
        owners: the rank of each parameter, in order.
    """
    state: dict[int, State] = {}
    groups: list[ParamGroup] = []
    owner, count = iter(owners), 0
    for group in state_dict["param_groups"]:
        indices = []
        for saved in group["params"]:
            if next(owner) == rank:
                indices.append(count)
                if saved in state_dict["state"]:
                    state[count] = state_dict["state"][saved]
                count += 1
        options = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        groups.append({**options, "params": indices})
    return {"state": state, "param_groups": groups}
