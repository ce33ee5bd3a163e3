"""Keeps a step from moving elements of a flat tensor that had no gradient though others had.

A plain process skips a parameter whose ``grad`` is None: no weight decay, no momentum, no change of state. Where
parameters share a tensor, such elements have zeros for gradients, which the optimizer can't tell from real ones. So
before a step their values and their state are put aside, and put back after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..optimizer_state.kinds import is_elementwise
from ..types import SavedState, Tree

# State that a first step makes from the optimizer's options; all other state starts from zero.
_STARTS_FROM_OPTIONS = ("step_size",)  # Rprop


class UnusedRanges(NamedTuple):
    """Holds them as (start, end) in the tensor seen as one dimension."""

    ranges: Sequence[tuple[int, int]]

    def saved(self, flat: torch.Tensor) -> list[torch.Tensor]:
        return [flat.view(-1)[a:b].clone() for a, b in self.ranges]

    def put_back(self, flat: torch.Tensor, saved: list[torch.Tensor] | None) -> None:
        for k, (a, b) in enumerate(self.ranges):
            now = flat.view(-1)[a:b]
            if saved is None:
                now.zero_()
            else:
                now.copy_(saved[k])


class UsedMask(NamedTuple):
    """Holds them as data, [S] (False: unused), where values are not known yet and all ranks build one program."""

    used: torch.Tensor

    def saved(self, flat: torch.Tensor) -> torch.Tensor:
        """Returns a copy of the whole tensor, [S]."""
        return flat.view(-1).clone()

    def put_back(self, flat: torch.Tensor, saved: torch.Tensor | None) -> None:
        now = flat.view(-1)
        before = torch.zeros_like(now) if saved is None else saved
        flat.copy_(torch.where(self.used, now, before).view(flat.shape))


Unused = UnusedRanges | UsedMask


class PutAside:
    """Holds what was put aside of one flat tensor before a step.

    Args:
        flat: the values that the step is going to change.
        state: what the optimizer keeps of them.
        unused: which of them are to stay.
    """

    @torch.no_grad()
    def __init__(self, flat: torch.Tensor, state: SavedState, unused: Unused) -> None:
        self._unused = unused
        self._values: Tree = unused.saved(flat)
        self._state: dict[str, Tree] = {k: unused.saved(v) for k, v in state_by_element(flat, state).items()}

    @torch.no_grad()
    def put_back(self, flat: torch.Tensor, state: SavedState) -> None:
        """Puts them back after the step; state that it has made starts as it would in a plain process."""
        self._unused.put_back(flat, self._values)
        for key, now in state_by_element(flat, state).items():
            if key in self._state or key not in _STARTS_FROM_OPTIONS:
                self._unused.put_back(now, self._state.get(key))


def state_by_element(flat: torch.Tensor, state: SavedState) -> dict[str, torch.Tensor]:
    """Returns what of an optimizer's state has one element for each of the tensor's."""
    return {k: v for k, v in state.items() if is_elementwise(k, v, flat.shape)}
