"""Optimizer state of flat segments, gathered on the device: as Python objects it would pass the host byte by byte.

Legend: W world size, S numel of one rank's segment.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from ...backend import Group
from ...checks.facts import all_gather_facts_or_objects
from ...types import StateDict, Tree
from .flat_segment import FlatSegment

_SPREAD, _NUMBER, _OTHER = "spread", "number", "other"


@torch.no_grad()
def gathered_state(
    segments: Sequence[FlatSegment], optimizer: Optimizer, group: Group, is_kept: bool
) -> dict[nn.Parameter, StateDict]:
    """State of all parameters, on the CPU where it ``is_kept``, and nothing elsewhere (collective).

    Args:
        segments: of all parameters, the same ones on all ranks.
        optimizer: of this rank's segments.
        group: the ranks.
        is_kept: whether this rank wants it.
    """
    mine = [
        {k: _kind(v, segment) for k, v in optimizer.state.get(segment.own, {}).items()}
        for segment in segments
    ]
    everybody = all_gather_facts_or_objects(group.channel("control"), mine, label="kinds of optimizer state")
    found: dict[nn.Parameter, StateDict] = {}
    for number, segment in enumerate(segments):
        kinds: dict[str, tuple[str, Tree, Tree]] = {}
        for theirs in everybody:
            for key, kind in theirs[number].items():
                kinds.setdefault(key, kind)
        for key, (form, dtype, _) in kinds.items():
            values = []
            if form == _SPREAD:
                own = optimizer.state.get(segment.own, {}).get(key)
                if own is None:  # nothing that is here had a gradient
                    own = torch.zeros_like(segment.own, dtype=dtype)
                values = gathered(segment, own, is_kept)
            for k, (p, owner) in enumerate(
                zip(segment.params, segment.owners, strict=True) if is_kept else ()
            ):
                if key in everybody[owner][number]:
                    there = everybody[owner][number][key]
                    found.setdefault(p, {})[key] = values[k] if values else _value(*there)
    return found


def _kind(value: Tree, segment: FlatSegment) -> tuple[str, Tree, Tree]:
    if not isinstance(value, torch.Tensor):
        return _OTHER, None, value
    if value.shape == segment.own.shape:
        return _SPREAD, value.dtype, None
    return (_NUMBER, value.dtype, value.item()) if value.dim() == 0 else (_OTHER, None, value.cpu())


def _value(form: str, dtype: torch.dtype, value: Tree) -> Tree:
    return torch.tensor(value, dtype=dtype) if form == _NUMBER else value


@torch.no_grad()
def gathered(segment: FlatSegment, own: torch.Tensor, is_kept: bool) -> list[torch.Tensor]:
    """What each rank has for its segment, [S], of each parameter, on the CPU where it ``is_kept`` (collective)."""
    group, full = segment.group, own
    if group.world_size > 1:
        full = own.new_empty(segment.layout.numel)
        group.all_gather_into(full, own, label="optimizer state")
        group.backend.mark_step(wait=True)  # ranks that do not read it take part, too
    return segment.split(full.cpu()) if is_kept else []
