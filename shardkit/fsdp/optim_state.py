"""Optimizer state of sharded parameters: to one full dict under one id for each original parameter, and back.

Ids count the original parameters of all flat parameters, unit by unit with the root first: fairscale's order. A full
dict is::

    {"state": {id: {...}}, "param_groups": [...], "param_id_map": {id: index in the optimizer or None},
     "uncollected_local_ids": [...]}

What has one element for each of the parameter's is gathered and cut into the original parameters' shapes; what is one
number for a flat parameter (the count of steps) is repeated for each original parameter.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from ..checks.facts import all_gather_facts_or_objects
from ..errors import ConfigurationError
from ..optimizers.state_shapes import NUMBERS
from ..types import ParamGroup, StateDict, Tree
from .flat_param import FlatParam
from .flat_values import put_together, taken_apart
from .state_of_shards import NOTE

EXTRA = ("param_id_map", "uncollected_local_ids")


def _plain(value: object) -> Tree:
    """One number as a Python number."""
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def is_spread(key: str, value: object, flat: FlatParam) -> bool:
    """Whether a state has one element for each of this rank's shard."""
    if not isinstance(value, torch.Tensor) or value.numel() != flat.layout.shard_numel:
        return False
    return value.dim() > 0 or (flat.param.dim() == 0 and key not in NUMBERS)


def _is_elementwise(key: str, values: Sequence[tuple[Any, torch.Size]]) -> bool:
    """Whether a state has one element for each of an original parameter's; of several, with their shapes."""
    if any(not isinstance(v, torch.Tensor) or v.numel() != shape.numel() for v, shape in values):
        return False
    return key not in NUMBERS or any(v.dim() > 0 for v, _ in values)


def _ids_of_originals(flats: Sequence[FlatParam]) -> list[list[int]]:
    ids, count = [], 0
    for flat in flats:
        ids.append(list(range(count, count + len(flat.originals))))
        count += len(flat.originals)
    return ids


@torch.no_grad()
def gather_parts(flat: FlatParam, value: torch.Tensor) -> list[torch.Tensor]:
    """The original parameters' parts of a state, on the CPU (collective)."""
    shard = value.detach().reshape(-1).to(flat.compute_device)
    full = shard
    if flat.group.world_size > 1:
        full = shard.new_empty(flat.layout.padded_numel)
        flat.group.channel("parameters").all_gather_into(
            full, shard, label=f"optimizer state of {flat.label or repr(flat.names[0])}"
        )
    pieces = taken_apart(full[: flat.layout.numel].cpu(), flat.layout)
    return [p.view(m.shape).clone() for p, m in zip(pieces, flat.originals, strict=True)]


def _keys_everywhere(flat: FlatParam, state: StateDict) -> dict[str, tuple[bool, Any]]:
    """For each state of a flat parameter: whether it is gathered, and its dtype or its value (ranks may lack it)."""
    mine = {k: (True, v.dtype) if is_spread(k, v, flat) else (False, _plain(v)) for k, v in state.items()}
    if flat.group.world_size == 1:
        return mine
    merged: dict[str, tuple[bool, Any]] = {}
    control = flat.group.channel("control")
    for theirs in all_gather_facts_or_objects(control, mine, label="kinds of optimizer state"):
        for key, what in theirs.items():
            merged.setdefault(key, what)
    return merged


def gather_full(
    flats: Sequence[FlatParam], uncollected: Sequence[FlatParam], optimizer_state: StateDict,
    optimizer: Optimizer, keep_on: bool,
) -> StateDict | None:  # fmt: skip
    """The full state dict where ``keep_on``, None elsewhere (collective).

    Args:
        flats: all flat parameters, in the order of ids.
        uncollected: those whose state is this rank's own and stays here.
        optimizer_state: ``optimizer.state_dict()``; further entries are passed on.
        optimizer: whose parameters are the flat parameters' shards.
        keep_on: whether this rank returns it.
    """
    params = [p for g in optimizer.param_groups for p in g["params"]]
    index_of = {id(p): i for i, p in enumerate(params)}
    state: dict[int, StateDict] = {}
    id_map: dict[int, int | None] = {}
    for flat, ids in zip(flats, _ids_of_originals(flats), strict=True):
        local = index_of.get(id(flat.param))
        own = {} if local is None else optimizer_state["state"].get(local, {})
        if flat in uncollected:
            id_map.update(dict.fromkeys(ids, local))
            _keep_uncollected(state, flat, ids, own)
            continue
        kinds = _keys_everywhere(flat, own)
        id_map.update(dict.fromkeys(ids, local if kinds else None))
        for key, (spread, what) in kinds.items():
            if spread:
                value = own.get(key)
                if value is None:  # none of its original parameters lies here, or nothing was ever used
                    value = torch.zeros(flat.layout.shard_numel, dtype=what)
                values: list[Any] = gather_parts(flat, value)
            else:
                values = [what] * len(ids)
            if keep_on:
                for i, v in zip(ids, values, strict=True):
                    state.setdefault(i, {})[key] = copy.copy(v)
    if not keep_on:
        return None
    others = {k: v for k, v in optimizer_state.items() if k not in ("state", "param_groups", *EXTRA)}
    local_ids = [index_of[id(f.param)] for f in uncollected if id(f.param) in index_of]
    return {
        "state": {**dict(sorted(state.items())), **_of_no_parameter(optimizer_state)},
        "param_groups": _full_groups(flats, optimizer, optimizer_state["param_groups"]),
        **others,
        "param_id_map": id_map,
        "uncollected_local_ids": local_ids,
    }


def _of_no_parameter(state_dict: StateDict) -> StateDict:
    """State that an optimizer keeps under names of its own and has alike on all ranks, as AdaScale does."""
    return {k: copy.deepcopy(v) for k, v in state_dict["state"].items() if not isinstance(k, int)}


def _keep_uncollected(state: dict[int, StateDict], flat: FlatParam, ids: list[int], own: StateDict) -> None:
    for key, value in own.items():
        if is_spread(key, value, flat) and flat.group.world_size == 1:
            pieces: list[Any] = taken_apart(value.detach().cpu().reshape(-1), flat.layout)
            values = [p.view(m.shape).clone() for p, m in zip(pieces, flat.originals, strict=True)]
        else:
            values = [_plain(value)] * len(ids)
        for i, v in zip(ids, values, strict=True):
            state.setdefault(i, {})[key] = v


def _full_groups(
    flats: Sequence[FlatParam], optimizer: Optimizer, saved: Sequence[StateDict]
) -> list[StateDict]:
    """Param groups with the ids of original parameters in place of the optimizer's."""
    ids = {id(f.param): m for f, m in zip(flats, _ids_of_originals(flats), strict=True)}
    originals = [[i for p in g["params"] for i in ids.get(id(p), [])] for g in optimizer.param_groups]
    return [
        {**copy.deepcopy({k: v for k, v in g.items() if k not in ("params", NOTE)}), "params": own}
        for g, own in zip(saved, originals, strict=True)
    ]


def shard_full(flats: Sequence[FlatParam], full: StateDict) -> StateDict:
    """This rank's part of a full state dict, for ``optimizer.load_state_dict``; the argument is not changed.

    Raises:
        ConfigurationError: it belongs to another model.
    """
    ids_of = _ids_of_originals(flats)
    count = sum(len(ids) for ids in ids_of)
    id_map: dict[int, int | None] = full.get("param_id_map") or {}
    known = set(id_map) or {i for g in full["param_groups"] for i in g["params"]}
    if known and len(known) != count:
        raise ConfigurationError(
            f"this optimizer state is of a model with {len(known)} parameters, this model has {count}; wrap the model "
            "as it was when the state was saved"
        )
    flat_of = {i: k for k, ids in enumerate(ids_of) for i in ids}
    groups: list[ParamGroup] = []
    local_of: dict[int, int] = {}
    for group in full["param_groups"]:
        locals_: list[int] = []
        for i in group["params"]:
            k = flat_of[i]
            if k not in local_of:  # those without state have no index: they come in the optimizer's order
                given = id_map.get(i)
                local_of[k] = len(local_of) if given is None else given
            if local_of[k] not in locals_:
                locals_.append(local_of[k])
        groups.append({**copy.deepcopy({k: v for k, v in group.items() if k != "params"}), "params": locals_})
    state = {}
    for k, (flat, ids) in enumerate(zip(flats, ids_of, strict=True)):
        have = {i: full["state"][i] for i in ids if full["state"].get(i)}
        if have and k in local_of:
            state[local_of[k]] = shard_state(flat, ids, have)
    others = {k: v for k, v in full.items() if k not in ("state", "param_groups", *EXTRA)}
    return {
        "state": {**dict(sorted(state.items())), **_of_no_parameter(full)},
        "param_groups": groups,
        **others,
    }


def shard_state(flat: FlatParam, ids: list[int], have: dict[int, StateDict]) -> StateDict:
    """One flat parameter's state from those of its original parameters; where there is none, zeros."""
    first = next(iter(have.values()))
    sharded = {}
    shapes = {i: m.shape for i, m in zip(ids, flat.originals, strict=True)}
    _check_originals(dict(zip(ids, flat.names, strict=True)), shapes, have)
    for key, value in first.items():
        if not _is_elementwise(key, [(s.get(key), shapes[i]) for i, s in have.items()]):
            sharded[key] = copy.copy(value)
            continue
        rows = [
            have[i][key].detach().reshape(-1) if i in have else value.new_zeros(m.shape.numel())
            for i, m in zip(ids, flat.originals, strict=True)
        ]
        size, rank = flat.layout.shard_numel, flat.group.rank
        sharded[key] = (
            put_together(rows, flat.layout)[rank * size : (rank + 1) * size].clone().view(flat.param.shape)
        )
    return sharded


def _check_originals(
    names: dict[int, str], shapes: dict[int, torch.Size], have: dict[int, StateDict]
) -> None:
    """State has one element for each of an original parameter's, or is one number; the same kind for all of a flat
    parameter.

    Raises:
        ConfigurationError: names the state and the parameter.
    """
    keys = {k for state in have.values() for k in state}
    for i, state in have.items():
        for key in sorted(keys - set(state), key=str):
            raise ConfigurationError(
                f"the optimizer state of {names[i]!r} lacks {key!r}, which others of its flat parameter have"
            )
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.numel() != 1 and value.shape != shapes[i]:
                raise ConfigurationError(
                    f"optimizer state {key!r} of {names[i]!r} has shape {tuple(value.shape)}, expected "
                    f"{tuple(shapes[i])}; nothing was loaded. This state is of another model: wrap the model as it was "
                    "when the state was saved"
                )
