"""State of optimizers: from what each rank has to torch's whole form, and back.

The whole form is ``{"state": {index: {...}}, "param_groups": [{..., "params": [index, ...], "param_names": [...]}]}``
where the index counts parameters over all groups. What has one element for each of a piece's is put together; anything
else is a parameter's as it is.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from ...backend import Group
from ...checks import options_of
from ...errors import ConfigurationError
from ...layout import Piece, buckets_by_numel
from ...optimizer_state.checking import check_same_state, check_state
from ...optimizer_state.kinds import is_elementwise, to_cpu
from ...optimizer_state.slots import Slot, Span
from ...optimizers.elementwise import is_known_elementwise
from ...types import ParamGroup, SavedState, StateDict
from .listed import Part
from .placing import Inner

_AT_ONCE = 2**24  # elements of parameters whose state is sent together


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
        for some in buckets_by_numel([p.shape.numel() for p in own], _AT_ONCE):
            sent = {own[k].name: mine[own[k].name] for k in some if own[k].name in mine}
            everybody = [sent] if group is None else _gathered(group, sent, recipient)
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


def _gathered(
    group: Group, sent: dict[str, PieceState], recipient: int
) -> list[dict[str, PieceState]] | None:
    control = group.channel("control")
    if recipient == -1:
        return control.all_gather_object(sent, label="state_dict of WholeParameters")
    return control.gather_object(sent, recipient, label="state_dict of WholeParameters")


def _here(inners: Sequence[Inner]) -> dict[str, PieceState]:
    """Returns state on this rank by name, on the CPU."""
    found: dict[str, PieceState] = {}
    for inner in inners:
        if inner.optimizer is None:
            continue
        for param, spans in zip(inner.params, inner.spans, strict=True):
            state = inner.optimizer.state.get(param)
            for part, piece in spans if state else ():
                flat = part.flat
                if (
                    piece is None
                    and flat is not None
                    and flat.group.backend.even_shards_only
                    and flat.group.rank
                ):
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
        everybody = group.channel("control").all_gather_object(mine, label="state_dict of WholeParameters")
        for k in range(len(options)):
            options[k] = next(
                (found for found in (theirs[k] for theirs in everybody) if found is not None), options[k]
            )
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
            whole = inner.whole_states()
            own = [whole.get(part.name, {}) for part in there]
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
            for index, (param, spans) in enumerate(zip(inner.params, inner.spans, strict=True))
            if any(by_name.get(part.name) for part, _ in spans)
        }
        for inner in inners
    ]
    return found, copy.deepcopy(options)


def _by_name(
    state_dict: StateDict, groups: Sequence[ParamGroup]
) -> tuple[dict[str, StateDict], list[StateDict]]:
    """Returns state by the model's names, and the options of each group."""
    if not isinstance(state_dict, dict) or not {"state", "param_groups"} <= set(state_dict):
        raise ConfigurationError(
            "this is no optimizer state: expected a dict with 'state' and 'param_groups', as state_dict() gives it"
        )
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
