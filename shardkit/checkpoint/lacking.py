"""State of shards that some ranks have and others lack.

[Note: lacking state] Where nothing in a rank's shard has ever had a gradient, its optimizer has no state of it, while
other ranks' optimizers have state of theirs. A parameter that lies on both would be stored in part. So the rank writes
what its state would be: zeros, and the numbers that others have. Whether there is such a case all ranks learn from what
they tell each other anyway; then, and only then, they exchange the kinds of state.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..checks.facts import all_gather_facts_or_objects
from ..types import StateDict
from .collecting import Collected
from .entries import Entry
from .leaves import Ranks
from .optimizer_state import Holder
from .slots import Slot

Kinds = dict[int, dict[str, tuple[bool, object]]]


def shards_with_state(holder: Holder | None, slots: Sequence[tuple[Slot, StateDict]]) -> str:
    """Which shards of an optimizer have state here, as a fact: one digit each."""
    if holder is None:
        return ""
    there = {id(slot.param) for slot, _ in slots}
    return "".join("01"[id(slot.param) in there] for slot in holder.shards())


def lacking_entries(collected: Collected, ranks: Ranks, everybody: Sequence[str]) -> list[Entry]:
    """What this rank writes in place of state that it lacks (collective where ranks differ)."""
    holder, group = collected.holder, ranks.group
    if holder is None or group is None or len(set(everybody)) == 1:
        return []
    shards = holder.shards()
    states = {id(slot.param): state for slot, state in collected.slots}
    mine: Kinds = {
        k: {key: _kind(slot, key, value) for key, value in states[id(slot.param)].items()}
        for k, slot in enumerate(shards)
        if id(slot.param) in states
    }
    merged: Kinds = {}
    for theirs in all_gather_facts_or_objects(
        group.channel("control"), mine, label="kinds of optimizer state"
    ):
        for k, kinds in theirs.items():
            merged.setdefault(k, {}).update(kinds)
    found: list[Entry] = []
    for k, slot in enumerate(shards):
        if k in merged and k not in mine:
            state = {key: _made(slot, *kind) for key, kind in merged[k].items()}
            for name, values in slot.leaves(state, ranks).items():
                found += [Entry(("optimizer", "state", name, key), value) for key, value in values.items()]
    return found


def _kind(slot: Slot, key: str, value: object) -> tuple[bool, object]:
    if slot.is_spread(key, value) and isinstance(value, torch.Tensor):
        return True, value.dtype
    if isinstance(value, torch.Tensor):
        return False, (value.tolist(), value.dtype)
    return False, value


def _made(slot: Slot, is_spread: bool, what: object) -> object:
    if is_spread and isinstance(what, torch.dtype):
        return torch.zeros_like(slot.param.detach(), dtype=what)
    if isinstance(what, tuple | list) and len(what) == 2 and isinstance(what[1], torch.dtype):
        return torch.tensor(what[0], dtype=what[1])
    return what
