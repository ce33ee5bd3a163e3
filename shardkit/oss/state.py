"""Optimizer state between its sharded form (each owner its own) and torch's whole form.

The whole form is torch's: ``{"state": {global index: {...}}, "param_groups": [...]}`` where the index counts
parameters over all groups. Per-parameter tensors have the parameter's shape; ``step`` is a 0-dim tensor.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..errors import ConfigurationError
from ..optimizers.state_shapes import check_state
from .segments import SegmentParameters

if TYPE_CHECKING:
    from .optimizer import OSS


def to_cpu(value: Any) -> Any:
    """Tensors inside nested containers as detached CPU copies; everything else as it is."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {k: to_cpu(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(to_cpu(v) for v in value)
    return value


def _owned_state(oss: OSS) -> dict[nn.Parameter, dict[str, Any]]:
    """State of each parameter that this rank answers for."""
    if not oss._segments:
        state: Any = oss.optim.state
        return {
            p: s
            for p, s in state.items()
            if not isinstance(p, str) and s and oss._owner.get(p, oss.rank) == oss.rank  # AdaScale has a name
        }
    owned: dict[nn.Parameter, dict[str, Any]] = {}
    for segment in oss.segments():
        owned.update(_split_segment_state(segment, oss.optim.state.get(segment.own, {})))
    return owned


def _split_segment_state(
    segment: SegmentParameters, state: dict[str, Any]
) -> dict[nn.Parameter, dict[str, Any]]:
    pieces: dict[nn.Parameter, dict[str, Any]] = {p: {} for p in segment.split_own(segment.own.detach())}
    for key, value in state.items():
        spread = isinstance(value, torch.Tensor) and value.shape == segment.own.shape
        views = segment.split_own(value) if spread else dict.fromkeys(pieces, value)
        for p, piece in pieces.items():
            piece[key] = views[p]
    return {p: piece for p, piece in pieces.items() if piece}


def collect(oss: OSS, recipient_rank: int) -> dict[int, dict[str, Any]] | None:
    """Every rank's state by global index, as CPU copies, on the recipient (-1: everywhere); None elsewhere."""
    index = {p: i for i, p in enumerate(oss._parameters())}
    mine = {index[p]: to_cpu(s) for p, s in _owned_state(oss).items()}
    group = oss._group.channel("control")
    everybody: list[dict[int, dict[str, Any]]] | None
    if recipient_rank == -1:
        everybody = group.all_gather_object(mine, label="consolidate_state_dict")
    else:
        everybody = group.gather_object(mine, recipient_rank, label="consolidate_state_dict")
    if everybody is None:
        return None
    merged = {i: s for part in everybody for i, s in part.items()}
    return dict(sorted(merged.items()))


def check_loadable(state_dict: dict[str, Any], groups: list[dict[str, Any]]) -> None:
    """Raises ConfigurationError (a ValueError) unless the dict has the groups and parameters of this optimizer."""
    if not isinstance(state_dict, dict) or not {"state", "param_groups"} <= set(state_dict):
        raise ConfigurationError(
            "this is no optimizer state: expected a dict with 'state' and 'param_groups', as consolidate_state_dict() "
            "and state_dict() give it"
        )
    saved, mine = (
        [len(g["params"]) for g in state_dict["param_groups"]],
        [len(g["params"]) for g in groups],
    )
    if saved != mine:
        raise ConfigurationError(
            f"loaded state dict has parameters per group {saved}, this optimizer has {mine}; build it over the same "
            "param groups first"
        )


def check_shapes(oss: OSS, state_dict: dict[str, Any], is_elementwise: bool) -> None:
    """Raises ConfigurationError if the state of any parameter, of whatever owner, has another shape."""
    saved = [i for g in state_dict["param_groups"] for i in g["params"]]
    own: Any = oss.optim.state if not oss._segments else {}
    states, mine = [], []
    for position, (i, p) in enumerate(zip(saved, oss._parameters(), strict=True)):
        found = state_dict["state"].get(i)
        if isinstance(found, dict):
            states.append((f"{position} (shape {tuple(p.shape)})", p.shape, found))
            mine.append(own.get(p, {}))
    check_state(states, mine, is_elementwise)


def select_owned(oss: OSS, state_dict: dict[str, Any]) -> dict[str, Any]:
    """The same dict with only the state of parameters that this rank owns; the caller's is not touched."""
    saved = [i for g in state_dict["param_groups"] for i in g["params"]]
    keep = {
        i: p
        for i, p in zip(saved, oss._parameters(), strict=True)
        if oss.runs_whole or oss._owner[p] == oss.rank
    }
    state = {i: _own_copies(s, keep[i].device) for i, s in state_dict["state"].items() if i in keep}
    return {**state_dict, "state": state}


def _own_copies(value: Any, device: torch.device) -> Any:
    """Copies tensors that would go on being shared with the caller: those that need no move to the device."""
    if isinstance(value, torch.Tensor):
        return value.clone() if value.device == device or value.dim() == 0 else value
    if isinstance(value, dict):
        return {k: _own_copies(v, device) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_own_copies(v, device) for v in value)
    return copy.copy(value)


def load_inner(oss: OSS, loaded: dict[nn.Parameter, Any]) -> None:
    """Puts per-parameter state (on the parameters' device already) into the inner optimizer."""
    oss._sync_options(oss.param_groups, oss.optim.param_groups)
    inner = local(oss)
    params = [p for g in oss.optim.param_groups for p in g["params"]]
    state: dict[int, Any]
    if oss._segments:
        segments = {s.own: s for s in oss.segments()}
        joined = [_join_segment_state(segments[p], loaded) for p in params]
        state = {i: s for i, s in enumerate(joined) if s}
    else:
        state = {i: _laid_out_like(p, loaded[p]) for i, p in enumerate(params) if loaded.get(p)}
    oss.optim.load_state_dict({"state": state, "param_groups": inner["param_groups"]})


def local(oss: OSS) -> dict[str, Any]:
    """The inner optimizer's dict. Looking up ``oss.state[param]`` leaves an entry, of others' parameters too."""
    state: Any = oss.optim.state
    for p in [p for p, s in state.items() if isinstance(s, dict) and not s]:
        del state[p]
    return oss.optim.state_dict()


def _laid_out_like(param: nn.Parameter, state: dict[str, Any]) -> dict[str, Any]:
    """State with the parameter's strides: fused optimizers walk memory, whatever order a checkpoint had."""
    fitted = dict(state)
    for key, value in state.items():
        if (
            isinstance(value, torch.Tensor)
            and value.shape == param.shape
            and value.stride() != param.stride()
        ):
            fitted[key] = torch.empty_like(param, dtype=value.dtype, requires_grad=False).copy_(value)
    return fitted


def _join_segment_state(segment: SegmentParameters, loaded: dict[nn.Parameter, Any]) -> dict[str, Any]:
    owned = list(segment.split_own(segment.own.detach()))
    have = {p: loaded[p] for p in owned if loaded.get(p)}
    if not have:
        # a rank that owns nothing still takes part in every step, so its state has to have the same shape
        example: dict[str, Any] = next((s for s in loaded.values() if s), {})
        return {
            k: torch.zeros_like(segment.own) if isinstance(v, torch.Tensor) and v.dim() > 0 else v
            for k, v in example.items()
        }
    first = next(iter(have.items()))
    joined: dict[str, Any] = {}
    for key, value in first[1].items():
        if isinstance(value, torch.Tensor) and value.shape == first[0].shape and value.dim() > 0:
            pieces = {p: have[p][key] if p in have else torch.zeros_like(p) for p in owned}
            joined[key] = segment.join_own(pieces)
        else:
            joined[key] = value
    return joined


def part_of_rank(oss: OSS, rank: int, state_dict: dict[str, Any]) -> dict[str, Any]:
    """The part of a whole state dict that belongs to one rank, with that rank's own indices."""
    state: dict[int, Any] = {}
    groups: list[dict[str, Any]] = []
    local = 0
    params = list(oss._parameters())
    position = 0
    for group in state_dict["param_groups"]:
        indices = []
        for saved in group["params"]:
            if oss._owner[params[position]] == rank:
                indices.append(local)
                if saved in state_dict["state"]:
                    state[local] = state_dict["state"][saved]
                local += 1
            position += 1
        options = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        groups.append({**options, "params": indices})
    return {"state": state, "param_groups": groups}
