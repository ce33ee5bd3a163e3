"""Runs the units of one root module: who is gathered when, and in which order gradients are reduced.

[Note: order] Ranks issue the same collectives in the same order because everything here follows the order in which
forward entered and left the units, which is the same on all ranks. Backward enters them in the opposite order of their
ends, and gathers in this order; a unit that it does not reach on this rank is gathered in its turn anyway, since
other ranks may reach it. Gradients are reduced in the opposite order of first entries (a unit within another comes
before it): a unit that is complete waits for those before it. What differs between ranks (which parameters of
a unit were used) can't change any of this.

[Note: prefetch] While a unit computes, the next one is gathered: the next of the last forward's order, or in backward
the one before. So two units' parameters are full at a time, besides those that stay so.

[Note: what stays gathered] The root (by option) and the unit that was called last: backward begins with it. They are
gathered anew in each forward, for between forwards the shards change.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch

from ..compiling import not_compiled
from ..errors import LifecycleError
from ..hooks import NO_BACKWARD, BackwardState, current_backward, tensors_in
from ..phases import Phase
from .unit import Unit


class Engine:
    """Schedules gathering and reduction for all units below one root.

    Attributes:
        units: the root's own first.
        state: the backward in progress.
        forwards: depth of forward calls in progress.
        is_lazy: execution is: a compiler decides when values exist (see ``lazy.py``).
        after: where execution is lazy, what the next gathers have to wait for.
    """

    def __init__(self, units: Sequence[Unit], prefetch: int = 1) -> None:
        self.units = list(units)
        self.state = BackwardState(self._end_of_backward)
        self.forwards = 0
        self._prefetch = prefetch
        self._recording = False
        self._order: list[Unit] = []  # calls of the last complete training forward
        self._calls: list[Unit] = []  # calls of the one that runs
        self._ends: list[Unit] = []  # the same units as their calls ended
        self._back: list[Unit] = []  # order of backward, for gathering
        self._reductions: list[Unit] = []  # order of reductions
        self._replan = False
        self._next_gather = 0
        self._next_reduction = 0
        self._in_flight: Unit | None = None
        self.is_lazy = any(not f.group.backend.has_storage for u in self.units for f in u.flats)
        self.after: list[torch.Tensor] = []
        self._last_reduced: list[torch.Tensor] = []
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
            unit.forget_between()
        self._recording = torch.is_grad_enabled()
        if self._recording:
            self._calls, self._ends = [], []
            for unit in self.units:
                if unit.notice_trainable():
                    self._replan = True

    @not_compiled
    def before_forward(self, unit: Unit, inputs: Any) -> None:
        """Gathers a unit for its forward on ``inputs``, and asks for the next one."""
        if self.is_lazy:
            self.after = tensors_in(inputs)
        self.forwards += 1
        in_backward = current_backward() != NO_BACKWARD
        if not self._recording and not in_backward:
            unit.release()  # what an earlier forward left gathered may be old
        unit.start_gather()
        if in_backward:  # activations are computed anew
            if self.state.task != NO_BACKWARD:
                self._catch_up(unit)
        elif self._recording:
            position = len(self._calls)
            self._calls.append(unit)
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
        if self._recording:
            self._ends.append(unit)
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
            if self._calls != self._order or self._replan:
                self._order = self._calls
                self._plan_backward()

    def _plan_backward(self) -> None:
        self._replan = False
        for unit in self.units:
            unit.position = -1
        self._back = list(dict.fromkeys(reversed(self._ends)))
        for k, unit in enumerate(self._back):
            unit.position = k
        self._reductions = [u for u in reversed(list(dict.fromkeys(self._order))) if u.is_trainable]

    @not_compiled
    def fail_forward(self, is_outermost: bool) -> None:
        """A forward raised."""
        self.forwards -= 1
        if is_outermost:
            self.forwards = 0
            self._recording = False
            self.after = []

    # ------------------------------------------------------------ backward
    def begin_backward(self) -> None:
        """A backward was noticed, from inside of it."""
        self.state.begin()
        self._next_gather = self._next_reduction = 0
        for unit in self.units:
            for local in unit.local:
                local.forget_if_cleared()

    def reach(self, unit: Unit, gradient: torch.Tensor | None) -> None:
        """Backward is about to enter a unit, with a gradient of its outputs."""
        if self.is_lazy and gradient is not None:
            self.after = [gradient, *self._last_reduced]
        if self.state.task == NO_BACKWARD:
            self.begin_backward()
        self._catch_up(unit)
        unit.finish_gather()

    def _catch_up(self, unit: Unit) -> None:
        """Gathers up to this unit in the order of backward, and asks for the next one."""
        if unit.position >= self._next_gather:
            last = unit.position + 1 + self._prefetch
            for other in self._back[self._next_gather : last]:
                if not other.is_held and (other.goes_backward or other is unit):
                    other.start_gather()
            self._next_gather = unit.position + 1
        if not unit.is_held:
            unit.start_gather()

    def complete(self, unit: Unit) -> None:
        """All gradients of a unit are there."""
        if not unit.is_entered:
            unit.release()
        if not self.state.accumulating:
            self._send_ready()

    def _send_ready(self) -> None:
        order = self._reductions
        while self._next_reduction < len(order):
            unit = order[self._next_reduction]
            if unit.waiting:
                return
            self._next_reduction += 1
            self._send(unit)

    def _send(self, unit: Unit) -> None:
        if torch.is_grad_enabled():  # backward(create_graph=True)
            with torch.no_grad():
                self._send(unit)
            return
        with Phase("shardkit::reduce-scatter"):
            self._receive()
            unit.send()
            self._in_flight = unit

    def _receive(self) -> None:
        if self._in_flight is not None:
            unit, self._in_flight = self._in_flight, None
            unit.receive()
            if self.is_lazy:
                self._last_reduced = [f.param.grad for f in unit.flats if f.param.grad is not None]

    @torch.no_grad()
    def _end_of_backward(self) -> None:
        try:
            self._finish_backward()
        except BaseException:
            self._abandon()
            raise
        finally:
            self.after = self._last_reduced = []
        for unit in self.units:
            unit.end_backward()

    def _finish_backward(self) -> None:
        for other in self._back[self._next_gather :]:  # other ranks may have reached them
            if other.goes_backward:
                other.start_gather()
                other.finish_gather()
                other.release()
        for unit in self.units:
            if unit.is_held:
                unit.release()
        if self.state.accumulating:
            for unit in self.units:
                for local in unit.local:
                    local.note()
            return
        for unit in self._reductions[self._next_reduction :]:
            self._send(unit)
        for unit in self.units:  # called outside of the root's forward, or twice in nested backwards
            if unit.has_local_gradients():
                self._send(unit)
        self._receive()

    def recover(self) -> None:
        """Forgets a backward that died of an exception."""
        if self.state.task != NO_BACKWARD and current_backward() == NO_BACKWARD:
            self.state.task = NO_BACKWARD
            self._abandon()

    def _abandon(self) -> None:
        unit, self._in_flight = self._in_flight, None
        if unit is not None:
            with contextlib.suppress(RuntimeError):  # its memory is in use until it is through, or has failed
                unit.receive()
        for unit in self.units:
            unit.drop_local_gradients()
            unit.end_backward()

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

    def __getstate__(self) -> Any:
        raise TypeError("an engine is not copied; the root makes a new one")
