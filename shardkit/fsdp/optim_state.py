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
import itertools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from ..checks import all_gather_facts_or_objects
from ..errors import ConfigurationError
from ..optimizers.saved_state import NUMBERS, is_shaped_like
from ..types import ParamGroup, StateDict, Tree
from .flat_values import put_together, taken_apart
from .originals import Listing, name_of_original
from .state_of_shards import StateOfShard, options_in

EXTRA = ("param_id_map", "uncollected_local_ids")
Form = Callable[[Listing, torch.Tensor, torch.Tensor], torch.Tensor]
"""Of a flat parameter, an original parameter's state (on the host), and this rank's part: what is returned."""


def _is_elementwise(key: str, values: Sequence[tuple[Any, torch.Size]]) -> bool:
    """Whether a state has one element for each of an original parameter's; of several, with their shapes."""
    if any(not isinstance(v, torch.Tensor) or v.numel() != shape.numel() for v, shape in values):
        return False
    return key not in NUMBERS or any(v.dim() > 0 for v, _ in values)


def _ids_of_originals(flats: Sequence[Listing]) -> list[list[int]]:
    count = itertools.count()
    return [[next(count) for _ in flat.originals] for flat in flats]


@torch.no_grad()
def gather_parts(flat: Listing, value: torch.Tensor) -> list[torch.Tensor]:
    """The original parameters' parts of a state, on the CPU (collective)."""
    shard = value.detach().as_subclass(torch.Tensor).contiguous().view(-1).to(flat.compute_device)
    full = shard
    if flat.group.world_size > 1:
        full = shard.new_empty(flat.layout.padded_numel)
        flat.group.channel("parameters").all_gather_into(
            full, shard, flat.layout.sizes, label=f"optimizer state of {flat.label}"
        )
    pieces = taken_apart(full[: flat.layout.numel].cpu(), flat.layout)
    return [p.view(m.shape).clone() for p, m in zip(pieces, flat.originals, strict=True)]


class Kind(NamedTuple):
    """What a state of a flat parameter is.

    Attributes:
        spread: it has one element for each of the shard, and is gathered.
        dtype: of a tensor.
        shape: of a tensor of one number.
        value: of all else that is not spread: the number, or what it is.
    """

    spread: bool
    dtype: torch.dtype | None
    shape: Sequence[int] | None
    value: Any

    @classmethod
    def of(cls, key: str, value: object, flat: Listing) -> Kind:
        if not isinstance(value, torch.Tensor):
            return cls(False, None, None, value)
        may_be_spread = value.dim() > 0 or (flat.param.dim() == 0 and key not in NUMBERS)
        if may_be_spread and value.numel() == flat.param.numel():
            return cls(True, value.dtype, None, None)
        if value.numel() == 1:
            return cls(False, value.dtype, tuple(value.shape), value.item())
        return cls(False, None, None, value)

    def made(self) -> Tree:
        """The value, a tensor again if it was one."""
        if self.shape is None:
            return copy.deepcopy(self.value)
        return torch.tensor(self.value, dtype=self.dtype).view(self.shape)


def gather_states(
    flats: Sequence[Listing],
    states: Sequence[StateDict],
    keep: bool = True,
    form: Form = lambda flat, part, shard: part,
    number: Callable[[Kind], Tree] = Kind.made,
) -> list[list[StateDict]]:
    """The state of each original parameter of each flat parameter (collective).

    Args:
        flats: in one order on all ranks.
        states: this rank's, of each.
        keep: whether this rank returns any.
        form: what becomes of a state with one element for each of a parameter's.
        number: what becomes of all else.

    Raises:
        ConfigurationError: on all ranks, if one lacks state that others have, or has another order.
    """
    found: list[list[StateDict]] = []
    for flat, own, kinds in zip(flats, states, _kinds_everywhere(flats, states), strict=True):
        found.append([{} for _ in flat.originals])
        for key, kind in kinds.items():
            mine = own.get(key)
            if mine is None and kind.spread:  # of the original parameters with a part here none was ever used
                mine = torch.zeros(flat.param.numel(), dtype=kind.dtype, device=flat.param.device)
            parts = gather_parts(flat, mine) if kind.spread and mine is not None else []
            for k, state in enumerate(found[-1] if keep else ()):
                state[key] = form(flat, parts[k], mine) if parts and mine is not None else number(kind)
    return found


def _kinds_everywhere(flats: Sequence[Listing], states: Sequence[StateDict]) -> list[dict[str, Kind]]:
    """What each state of each flat parameter is on any rank."""
    found = [{k: Kind.of(k, v, f) for k, v in s.items()} for f, s in zip(flats, states, strict=True)]
    for group in {f.group.ranks: f.group for f in flats}.values():
        numbers = [n for n, f in enumerate(flats) if f.group.ranks == group.ranks]
        names = [name_of_original(flats[n].originals[0].param) for n in numbers]
        mine = names, [{k: tuple(kind) for k, kind in found[n].items()} for n in numbers]
        if group.world_size == 1:
            continue
        everybody = all_gather_facts_or_objects(
            group.channel("control"), mine, label="kinds of optimizer state"
        )
        for rank, (theirs, _) in zip(group.ranks, everybody, strict=True):
            if theirs != everybody[0][0]:
                raise ConfigurationError(
                    f"the optimizer of rank {rank} has other parameters than rank {group.ranks[0]}'s, or another "
                    "order of them: make it of the same parameters() on every rank"
                )
        for k, n in enumerate(numbers):
            found[n] = _merged(flats[n], [kinds[k] for _, kinds in everybody])
    return found


def _merged(flat: Listing, everybody: Sequence[dict[str, Any]]) -> dict[str, Kind]:
    merged: dict[str, Kind] = {}
    for theirs in everybody:
        for key, what in theirs.items():
            merged.setdefault(key, Kind(*what))
    # of one parameter, all ranks know whether it has had a gradient, also those without a part of it
    is_alone = len(flat.originals) == 1 and flat.layout.numel
    needed = [key for key, kind in merged.items() if kind.spread and is_alone]
    for rank, theirs in zip(flat.group.ranks, everybody, strict=True):
        for key in needed:
            if key not in theirs:
                raise ConfigurationError(
                    f"rank {rank} has no optimizer state {key!r} of {name_of_original(flat.originals[0].param)!r}, "
                    "which other ranks have: its optimizer lacks the parameter, or state was removed or loaded on "
                    "some ranks only. Make the optimizer of the same parameters, and load state, on every rank"
                )
    return merged


def gather_full(
    flats: Sequence[Listing], uncollected: Sequence[Listing], optimizer_state: StateDict,
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
    last = len(params)  # as the optimizer has them: their places are for all ranks
    collected = sorted(
        (f for f in flats if f not in uncollected), key=lambda f: index_of.get(id(f.param), last)
    )
    own_of = {f: optimizer_state["state"].get(index_of.get(id(f.param)), {}) for f in flats}
    whole = gather_states(
        collected, [own_of[f] for f in collected], keep_on, number=lambda kind: copy.copy(kind.value)
    )
    states_of = dict(zip(collected, whole, strict=True))
    for flat, ids in zip(flats, _ids_of_originals(flats), strict=True):
        local, own = index_of.get(id(flat.param)), own_of[flat]
        if flat in uncollected:
            _keep_uncollected(state, flat, ids, own)
        else:
            state.update((i, s) for i, s in zip(ids, states_of[flat], strict=True) if s)
        id_map.update(dict.fromkeys(ids, local if own or flat in uncollected else None))
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


def _keep_uncollected(state: dict[int, StateDict], flat: Listing, ids: list[int], own: StateDict) -> None:
    for key, value in own.items():
        kind = Kind.of(key, value, flat)
        is_here = kind.spread and flat.group.world_size == 1
        values: list[Any] = gather_parts(flat, value) if is_here else [kind.value] * len(ids)
        for i, v in zip(ids, values, strict=True):
            state.setdefault(i, {})[key] = v


def _full_groups(
    flats: Sequence[Listing], optimizer: Optimizer, saved: Sequence[StateDict]
) -> list[StateDict]:
    """Param groups with the ids of original parameters in place of the optimizer's."""
    ids = {id(f.param): m for f, m in zip(flats, _ids_of_originals(flats), strict=True)}
    originals = [[i for p in g["params"] for i in ids.get(id(p), [])] for g in optimizer.param_groups]
    return [{**options_in(g), "params": own} for g, own in zip(saved, originals, strict=True)]


def shard_full(flats: Sequence[Listing], full: StateDict) -> StateDict:
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
    is_cut = any(f.group.world_size > 1 or f.param.shape != f.originals[0].shape for f in flats)
    kind = OrderedDict if is_cut else dict  # as ``optimizer.state_dict()`` has them, and state below
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
        options = copy.deepcopy({k: v for k, v in group.items() if k != "params"})
        groups.append(kind(options, params=locals_))
    state = {}
    for k, (flat, ids) in enumerate(zip(flats, ids_of, strict=True)):
        have = {i: full["state"][i] for i in ids if full["state"].get(i)}
        if have and k in local_of:
            state[local_of[k]] = {
                key: v.as_subclass(StateOfShard)
                if flat.group.world_size > 1 and is_shaped_like(v, flat.param)
                else v
                for key, v in shard_state(flat, ids, have).items()
            }
    others = {k: v for k, v in full.items() if k not in ("state", "param_groups", *EXTRA)}
    return {
        "state": {**dict(sorted(state.items())), **_of_no_parameter(full)},
        "param_groups": groups,
        **others,
    }


def shard_state(flat: Listing, ids: list[int], have: dict[int, StateDict]) -> StateDict:
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
        own = put_together(rows, flat.layout)[flat.layout.part(flat.group.rank)]
        sharded[key] = own.clone().view(flat.param.shape)
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
