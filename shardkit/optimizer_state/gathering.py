"""Gathers the state of shards into whole parameters' states: once, for FSDP's shards and for OSS's segments.

What has one element for each of a shard's is gathered and taken apart; anything else is repeated for each parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..backend import Group
from ..checks import all_gather_facts_or_objects
from ..errors import ConfigurationError
from ..types import StateDict, Tree
from .kinds import StateKind
from .slots import Slot

Form = Callable[[Slot, torch.Tensor, torch.Tensor], torch.Tensor]
"""Of a slot, a whole parameter's state (on the host), and this rank's part: what is returned."""

Kinds = dict[str, StateKind]


@torch.no_grad()
def gather_states(
    slots: Sequence[Slot],
    states: Sequence[StateDict],
    keep: bool = True,
    form: Form = lambda slot, part, shard: part,
    number: Callable[[StateKind], Tree] = StateKind.made,
) -> list[list[StateDict]]:
    """Gathers the state of each parameter of each shard (collective).

    Args:
        slots: shards, in one order on all ranks.
        states: this rank's, of each.
        keep: whether this rank returns any.
        form: what becomes of a state with one element for each of a parameter's.
        number: what becomes of all else.
    """
    found: list[list[StateDict]] = []
    for slot, own, everybody in zip(slots, states, kinds_everywhere(slots, states), strict=True):
        found.append([{} for _ in slot.spans])
        for key, kind in _merged(slot, everybody).items():
            parts: list[torch.Tensor] = []
            mine: Tree = own.get(key)
            if kind.spread and slot.join is not None:
                if mine is None:  # nothing that is here ever had a gradient
                    mine = torch.zeros(slot.param.shape, dtype=kind.dtype, device=slot.param.device)
                parts = slot.join(mine, keep)
            for k, state in enumerate(found[-1] if keep else ()):
                theirs = kind if slot.owners is None else everybody[slot.owners[k]].get(key)
                if theirs is not None:
                    state[key] = form(slot, parts[k], mine) if kind.spread else number(theirs)
    return found


def kinds_everywhere(slots: Sequence[Slot], states: Sequence[StateDict]) -> list[list[Kinds]]:
    """Learns what each slot's state is on each rank of its group (collective)."""
    mine = [
        {key: StateKind.of(key, value, slot.param.shape) for key, value in own.items()}
        for slot, own in zip(slots, states, strict=True)
    ]
    found = [[kinds] for kinds in mine]
    groups: dict[tuple[int, ...], Group] = {s.group.ranks: s.group for s in slots if s.group is not None}
    for ranks, group in groups.items():
        if group.world_size == 1:
            continue
        numbers = [n for n, slot in enumerate(slots) if slot.group is not None and slot.group.ranks == ranks]
        told = (
            [slots[n].names[0] for n in numbers],
            [{k: tuple(v) for k, v in mine[n].items()} for n in numbers],
        )
        everybody = all_gather_facts_or_objects(
            group.channel("control"), told, label="kinds of optimizer state"
        )
        for rank, (names, _) in zip(ranks, everybody, strict=True):
            if names != everybody[0][0]:
                raise ConfigurationError(
                    f"the optimizer of rank {rank} has other parameters than rank {ranks[0]}'s, or another "
                    "order of them: make it of the same parameters() on every rank"
                )
        for k, n in enumerate(numbers):
            found[n] = [{key: StateKind(*what) for key, what in kinds[k].items()} for _, kinds in everybody]
    return found


def _merged(slot: Slot, everybody: Sequence[Kinds]) -> Kinds:
    merged: Kinds = {}
    for theirs in everybody:
        for key, kind in theirs.items():
            merged.setdefault(key, kind)
    # of one parameter, all ranks know whether it has had a gradient, also those without a part of it
    is_alone = len(slot.spans) == 1 and slot.spans[0].shape.numel() and slot.owners is None
    for rank, theirs in enumerate(everybody) if is_alone and slot.group is not None else ():
        for key, kind in merged.items():
            if kind.spread and key not in theirs:
                raise ConfigurationError(
                    f"rank {slot.group.ranks[rank] if slot.group else rank} has no optimizer state {key!r} of "
                    f"{slot.names[0]!r}, which other ranks have: its optimizer lacks the parameter, or state was "
                    "removed or loaded on some ranks only. Make the optimizer of the same parameters, and load state, "
                    "on every rank"
                )
    return merged
