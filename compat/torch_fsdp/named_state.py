"""Optimizer state of sharded models by the names of original parameters, as torch's FSDP has it::

    {"state": {name: {...}}, "param_groups": [{"params": [name, ...], "lr": ...}, ...]}

Parameters that no unit holds are in it too. What has one element for each of a parameter's has the parameter's shape.
Values stay what they were: tensors of one number are tensors.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from shardkit.backend import Group
from shardkit.errors import ConfigurationError
from shardkit.fsdp.names import plain_name
from shardkit.fsdp.optim_state import Form, gather_states, shard_state
from shardkit.fsdp.originals import Listing
from shardkit.fsdp.state import state_of
from shardkit.fsdp.state_of_shards import options_in
from shardkit.optimizers.shards import refuse_stand_ins
from shardkit.torch_seams.dtensors import is_cut, whole
from shardkit.types import ParamGroup, StateDict


class _Known(NamedTuple):
    """A parameter of a model.

    Attributes:
        names: of the original parameters.
        flat: None of what no unit holds.
        position: in the optimizer; -1 where that does not have it.
    """

    names: list[str]
    flat: Listing | None
    position: int


def _parameters_of(model: nn.Module, optimizer: Optimizer) -> dict[int, _Known]:
    """All parameters of a model by identity, shards as the core lists them first, the same order on all ranks.

    Raises:
        ConfigurationError: the optimizer has others.
    """
    refuse_stand_ins(optimizer, "state by names")
    params = [p for group in optimizer.param_groups for p in group["params"]]
    position = {id(p): i for i, p in enumerate(params)}
    found: dict[int, _Known] = {}
    for path, m in model.named_modules():
        state = state_of(m)
        if state is not None:
            before = plain_name(path)
            for flat in state.listings:
                names = [plain_name(f"{before}.{n}" if before else n) for n in flat.names]
                found[id(flat.param)] = _Known(names, flat, position.get(id(flat.param), -1))
    for name, param in model.named_parameters():
        found.setdefault(id(param), _Known([plain_name(name)], None, position.get(id(param), -1)))
    for param in params:
        if id(param) not in found:
            raise ConfigurationError(
                f"the optimizer has a parameter of shape {tuple(param.shape)} that the model does not list; make "
                "it of model.parameters() after the model was wrapped, and pass the outermost model here"
            )
    return found


# ------------------------------------------------------------ gathered
def gather_named(
    model: nn.Module, optimizer: Optimizer, state_dict: StateDict | None, form: Form, keep: bool = True
) -> StateDict:
    """An optimizer's state by names (collective).

    Args:
        model: whose parameters the optimizer has; it need be no unit itself.
        optimizer: whose state it is.
        state_dict: its ``state_dict()``, the default.
        form: what becomes of an original parameter's state.
        keep: whether this rank returns anything.

    Returns:
        The state; empty without ``keep``.

    Raises:
        ConfigurationError: the optimizer is not the model's.
    """
    known = _parameters_of(model, optimizer)
    state_dict = optimizer.state_dict() if state_dict is None else state_dict
    state: StateDict = {}
    own_of = [state_dict["state"].get(k.position, {}) for k in known.values()]
    flats = [(k.flat, own) for k, own in zip(known.values(), own_of, strict=True) if k.flat is not None]
    whole = iter(gather_states([flat for flat, _ in flats], [own for _, own in flats], keep, form))
    for (names, flat, _), own in zip(known.values(), own_of, strict=True):
        parts = [own] if flat is None else next(whole)
        state.update((n, s) for n, s in zip(names, parts, strict=True) if s)
    if not keep:
        return {}
    others = {k: v for k, v in state_dict["state"].items() if not isinstance(k, int)}
    rest = {k: v for k, v in state_dict.items() if k not in ("state", "param_groups")}
    found = {"state": {**state, **copy.deepcopy(others)}, **rest}
    if "param_groups" in state_dict:
        found["param_groups"] = [
            {**options_in(saved), "params": [n for p in group["params"] for n in known[id(p)].names]}
            for group, saved in zip(optimizer.param_groups, state_dict["param_groups"], strict=True)
        ]
    return found


# ------------------------------------------------------------ to be loaded
Source = Callable[[Listing | None, Sequence[str]], Mapping[str, StateDict]]
"""Of a flat parameter and the names of its original parameters: their state, where there is some."""


def cut_named(
    model: nn.Module, optimizer: Optimizer, groups: Sequence[ParamGroup], source: Source
) -> StateDict:
    """This rank's part of state by names, for ``optimizer.load_state_dict``.

    Args:
        model, optimizer: as they are now.
        groups: the ``param_groups`` that were saved. Options go to the optimizer's groups by the parameters in them.
            Without any, nothing was saved of them, and they stay.
        source: asked for each parameter of the model, in one order on all ranks.

    Raises:
        ConfigurationError: the state is of other parameters, or of other groups.
    """
    known = _parameters_of(model, optimizer)
    group_of: dict[str, ParamGroup] = {}
    for group in groups:
        for name in group["params"]:
            if not isinstance(name, str):
                raise ConfigurationError(
                    "this optimizer state is by numbers of parameters; make it one by names: "
                    "FSDP.rekey_optim_state_dict(state, OptimStateKeyType.PARAM_NAME, unwrapped_model)"
                )
            group_of[plain_name(name)] = group
    state: dict[int, StateDict] = {}
    for own, flat, position in known.values():
        have = source(flat, own)  # of all, in the model's order, for a source may be a collective
        if have and position >= 0:
            state[position] = _part(flat, own, have)
    made: list[ParamGroup] = []
    for group in optimizer.param_groups:
        inside = [known[id(p)] for p in group["params"]]
        options = _options_of([n for k in inside for n in k.names], group_of) if groups else options_in(group)
        made.append({**options, "params": [k.position for k in inside]})
    return {"state": dict(sorted(state.items())), "param_groups": made}


def _options_of(names: Sequence[str], group_of: Mapping[str, ParamGroup]) -> ParamGroup:
    lacking = [n for n in names if n not in group_of]
    if lacking:
        raise ConfigurationError(
            f"this optimizer state names no group of parameter {lacking[0]!r}: it is of another model, or of an "
            "optimizer that did not have it; nothing was loaded"
        )
    found: list[ParamGroup] = []
    for name in names:
        options = {k: v for k, v in group_of[name].items() if k not in ("params", "param_names")}
        if options not in found:
            found.append(options)
    if len(found) > 1:
        keys = sorted(k for k in found[0] if found[0][k] != found[1].get(k))
        raise ConfigurationError(
            f"parameters of one group of the optimizer were in groups with other options ({', '.join(keys)}) when "
            "this state was saved; make the optimizer with the groups that it had"
        )
    return copy.deepcopy(found[0]) if found else {}


def _part(flat: Listing | None, names: Sequence[str], have: Mapping[str, StateDict]) -> StateDict:
    if flat is None:
        part = have[names[0]]
    else:
        part = shard_state(
            flat, list(range(len(names))), {i: have[n] for i, n in enumerate(names) if n in have}
        )
    # copies: torch loads tensors such as "step" as they are, and counts on in them
    return {k: v.clone() if isinstance(v, torch.Tensor) else copy.deepcopy(v) for k, v in part.items()}


def from_state(state: Mapping[str, StateDict]) -> Source:
    """Of a state that this rank has."""
    plain = {plain_name(n): s for n, s in state.items() if isinstance(n, str)}

    def source(flat: Listing | None, names: Sequence[str]) -> Mapping[str, StateDict]:
        return {
            n: {k: whole(v) if is_cut(v) else v for k, v in plain[n].items()} for n in names if plain.get(n)
        }

    return source


def from_rank_0(state: Mapping[str, StateDict], group: Group) -> Source:
    """Of a state that only the first rank of a group has; it sends it parameter by parameter (collective)."""
    mine = from_state(state)

    def source(flat: Listing | None, names: Sequence[str]) -> Mapping[str, StateDict]:
        have = mine(flat, names) if group.rank == 0 else {}
        control = group.channel("control")
        sent: Mapping[str, StateDict] = control.broadcast_object(have, 0, label="optimizer state of rank 0")
        return sent

    return source
