"""Whether backward goes through frozen units: what the graphs of all ranks say, together.

A trainable unit is gathered for backward on all ranks, whatever single ones detached. Doing so with frozen ones, too,
would gather a frozen encoder for nothing, since nothing in front of it needs a gradient. Only a rank's own graph tells
whether backward goes through, and ranks may have other graphs. So they tell each other, in one exchange of a byte a
unit after each forward, whose result is looked at when backward comes near such a unit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..backend import Group, ReduceOp, Work
from .unit import Unit


class _Asked(NamedTuple):
    units: list[Unit]
    flags: torch.Tensor  # [units], on its way
    work: Work


class FrozenUnits:
    """The frozen units of one plan.

    Args:
        units: those that may lie behind something trainable.
    """

    def __init__(self, units: Sequence[Unit] = ()) -> None:
        self._by_group: dict[Group, list[Unit]] = {}
        self._asked: list[_Asked] = []
        for unit in units:
            group = unit.group
            if group is not None and group.world_size > 1:
                self._by_group.setdefault(group, []).append(unit)

    def ask(self) -> None:
        """Starts the exchange of what the forward that has just ended says (collective)."""
        for group, units in self._by_group.items():
            flags = torch.tensor([int(u.is_reached) for u in units], dtype=torch.uint8, device="cpu")
            flags = flags.to(group.backend.device())
            work = group.channel("control").all_reduce(
                flags, op=ReduceOp.MAX, async_op=True, label="which frozen units backward goes through"
            )
            self._asked.append(_Asked(units, flags, work))
            for unit in units:
                unit.is_undecided = True

    def settle(self) -> None:
        """Waits for the exchanges that were started."""
        asked, self._asked = self._asked, []
        for units, flags, work in asked:
            work.wait()
            for unit, flag in zip(units, flags.tolist(), strict=True):
                unit.goes_backward = unit.goes_backward or bool(flag)
                unit.is_undecided = False
