"""Runs the units of one root module: who is gathered in forward, and kept for backward (``backward.py``).

[Note: order] Ranks issue the same collectives in the same order because everything here follows the order in which
forward entered and left the units, which is the same on all ranks; ``backward_plan.py`` makes one order of a backward's
gathers and reductions of it. What differs between ranks (which parameters were used, where backward ends) can't change
it: a unit that is complete waits for its turn, one that is not when backward has left it is reduced as it is, and what
backward did not reach on this rank is gathered in its turn anyway, since other ranks may reach it.

[Note: prefetch] While a unit computes, the next one is gathered: the next of the last forward's order, or in backward
the one before. So two units' parameters are full at a time, besides those that stay so.

[Note: what stays gathered] The root (by option) and the unit that was called last: backward begins with it. They are
gathered anew in each forward, for between forwards the shards change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn

import torch

from ..errors import LifecycleError
from ..torch_seams.compiling import not_compiled
from ..torch_seams.hooks import (
    NO_BACKWARD,
    current_backward,
    surrounding_checkpoint,
    tensors_in,
)
from .backward import Backward, ForwardGraph, Watcher
from .backward_plan import End, plan_backward
from .frozen import FrozenUnits
from .refusals import written_original
from .threads import NO_THREAD
from .unit import Unit


class Engine(Backward):
    """Schedules gathering and reduction for all units below one root; the forward half."""

    def __init__(
        self, units: Sequence[Unit], prefetch: int = 1, after_backward: Callable[[], None] | None = None
    ) -> None:
        super().__init__(units, after_backward)
        self._prefetch = prefetch
        self._recording = False
        # of the last complete training forward:
        self._order_of_ends: list[End] = []
        self._checkpoints: list[int] = []  # of each call the checkpoint around it, by number; -1 for none
        # of the one that runs:
        self._calls: list[Unit] = []
        self._ends: list[End] = []
        self._around: list[object] = []
        self._replan = False
        for unit in self.units:
            unit.engine = self

    # ------------------------------------------------------------ forward
    @not_compiled
    def begin_forward(self) -> None:
        """The root's forward begins: what is gathered still is of an earlier one."""
        self.recover()
        for unit in self.units:
            if unit.is_held:
                unit.release()
            if unit.keeps_between:
                unit.forget_between()
        if self._held:
            for flat in self._held:
                if flat.held_at != flat.version:
                    flat.drop()
            self._held = [f for f in self._held if f.held_at is not None]
        self._recording = torch.is_grad_enabled()
        if self._recording:
            self._calls, self._ends, self._around = [], [], []
            is_first = not self.pending
            if is_first:
                self._frozen.settle()
            for unit in self.units:
                if unit.notice_trainable():
                    self._replan = True
                if is_first:
                    unit.is_reached = False

    @not_compiled
    def before_forward(self, unit: Unit, inputs: object) -> None:
        """Gathers a unit for its forward on ``inputs``, and asks for the next one."""
        if self.is_lazy:
            self.after = tensors_in(inputs)
        self.forwards += 1
        in_backward = current_backward() != NO_BACKWARD
        if not self._recording and not in_backward:
            unit.release()  # what an earlier forward left gathered may be old
        if self._locked:
            self._unlock(unit.needs)
        if in_backward and self.state.task != NO_BACKWARD:  # activations are computed anew
            self._gather_again(unit)
        elif not unit.is_held:
            unit.start_gather()
        if self._recording and not in_backward:
            position = len(self._calls)
            self._calls.append(unit)
            checkpoint = surrounding_checkpoint()
            self._around.append(checkpoint)
            if checkpoint is not None:
                unit.is_reached = True
            order = self._order
            if position < len(order) and order[position] is unit:
                for following in order[position + 1 : position + 1 + self._prefetch]:
                    following.start_gather()
        unit.finish_gather()

    @not_compiled
    def after_forward(self, unit: Unit) -> None:
        """Frees what the unit gathered, unless backward will need it soon."""
        self.forwards -= 1
        if current_backward() != NO_BACKWARD:
            return
        if self.forwards == 0:
            self.thread = NO_THREAD  # now, for what follows may raise
        if self._recording:
            self._ends.append(End(unit, len(self._calls)))
            if unit.keep_after_forward:
                return
            calls, order = self._calls, self._order
            if len(calls) == len(order) and calls[-1] is unit and order[-1] is unit:
                return  # backward begins with it
        unit.release(until_backward=self._recording)

    @not_compiled
    def end_forward(self) -> None:
        """The root's forward is through."""
        self.after = []
        if self._recording:
            self._recording = False
            self.state.is_due = not self.state.accumulating
            checkpoints = _numbered(self._around)
            self._around = []
            if (
                self._replan
                or self._calls != self._order
                or checkpoints != self._checkpoints
                or self._ends != self._order_of_ends
            ):
                self._order, self._order_of_ends, self._checkpoints = self._calls, self._ends, checkpoints
                self._make_plan()
            for unit in self._plan.gathers:
                unit.goes_backward = unit.is_reached
            self._frozen.ask()
            self._lock_held()
            for flat in self._locked:
                if flat.written:
                    raise written_original(flat)

    def _lock_held(self) -> None:
        """Forward is over: what stays gathered is for backward, or for nobody, and not for the program."""
        for unit in self.units:
            if unit.is_held:
                for flat in unit.needs:
                    flat.store.lock()
                    self._locked.append(flat)
        if self._held:
            self._lock(self._held)

    def _make_plan(self) -> None:
        self._replan = False
        for unit in self.units:
            unit.position = -1
        self._plan = plan_backward(
            self._order, self._order_of_ends, self._checkpoints, self.units, self._prefetch
        )
        for k, unit in enumerate(self._plan.gathers):
            unit.position = k
        self._frozen.settle()
        self._frozen = FrozenUnits([] if self.is_lazy else frozen_behind_trainable(self._order))

    def note_outputs(self, unit: Unit, have_graph: bool) -> None:
        """A call of a unit has ended, in which gradients were enabled; whether its outputs lead back into it."""
        if self._recording and (have_graph or unit.is_trainable):
            unit.is_reached = True

    def watching(self, watcher: Watcher) -> ForwardGraph:
        """What the outputs of the root's forward have to tell when backward reaches them, on behalf of ``watcher``."""
        graph = ForwardGraph(self, watcher)
        self.pending.add(graph)
        return graph

    @not_compiled
    def fail_forward(self, is_outermost: bool) -> None:
        """A forward raised."""
        self.forwards -= 1
        if is_outermost:
            self.forwards = 0
            self._recording = False
            self.after = []
            self._around = []
            self._lock_held()

    # ------------------------------------------------------------ between steps
    def check_idle(self, what: str) -> None:
        """Raises LifecycleError in the middle of a forward or backward."""
        if self.forwards or (self.state.task != NO_BACKWARD and current_backward() != NO_BACKWARD):
            raise LifecycleError(
                f"{what} inside of forward or backward is not possible; call it between steps"
            )
        self.recover()

    def set_accumulating(self, value: bool) -> bool:
        """Switches ``no_sync``; returns what it was."""
        before, self.state.accumulating = self.state.accumulating, value
        return before

    def __getstate__(self) -> NoReturn:
        raise TypeError("an engine is not copied; the root makes a new one")


def frozen_behind_trainable(calls: Sequence[Unit]) -> list[Unit]:
    """Frozen units one of whose calls began after that of a trainable unit (the one around it, maybe)."""
    first = next((k for k, unit in enumerate(calls) if unit.is_trainable), len(calls))
    return [unit for unit in dict.fromkeys(calls[first:]) if not unit.is_trainable]


def _numbered(checkpoints: list[object]) -> list[int]:
    """Numbers for objects, in order of appearance; -1 for None."""
    numbers: dict[int, int] = {}
    return [-1 if c is None else numbers.setdefault(id(c), len(numbers)) for c in checkpoints]
