"""Runs backward through the units of one root: who is gathered when, and in which order gradients are reduced.

[Note: several forwards] One backward may go through several forwards of the root (two views of a batch, the two losses
of a discriminator). A parameter's gradient is there when it has come back from all of them, so that leaving a unit says
nothing. Then gathers keep their order and so do reductions, but a unit is reduced when it is complete, and nobody waits
for a reduction before the end of backward: waiting for it in between could be for a rank that waits for a gather. Where
collectives of all channels need one order, none is issued before the end either.

[Note: graphs of gradients] A backward with ``create_graph=True`` (a penalty on gradients of inputs, forces) leaves a
graph that needs parameters, and no hook tells when a later backward comes to it. So the units that it went through stay
gathered from then on, through any number of backwards and forwards, until the shards change: until the step.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Protocol

import torch

from ..torch_seams.compiling import not_compiled
from ..torch_seams.hooks import (
    DROPPED,
    NO_BACKWARD,
    BackwardState,
    current_backward,
)
from .backward_plan import BackwardPlan
from .flat_param import FlatParam
from .frozen import FrozenUnits
from .refusals import backward_with_graph, changed_since_forward
from .store import LOCKED
from .threads import NO_THREAD, check_one_thread, this_thread
from .tracing import check_backward
from .unit import Unit

_version_of = attrgetter("_version")


class Watcher(Protocol):
    """Is told when backward reaches an output of a forward."""

    def enter_backward(self, gradient: torch.Tensor | None = None) -> None: ...


class ForwardGraph:
    """Watches the outputs of one forward of the root, and ends with what autograd keeps of it.

    Args:
        watcher: is told, too.
    """

    def __init__(self, backward: Backward, watcher: Watcher) -> None:
        self._backward, self._watcher = backward, watcher
        self.versions = {
            f: sum(map(_version_of, f.versioned)) for u in backward.units for f in u.flats if f.trains
        }

    @not_compiled
    def enter_backward(self, gradient: torch.Tensor | None = None) -> None:
        """Backward reached an output of the root."""
        backward = self._backward
        if backward.state.task == NO_BACKWARD:
            backward.entered = []
        if self not in backward.entered:
            backward.entered.append(self)
        self._watcher.enter_backward(gradient)
        backward.pending.discard(self)


class Backward:
    """The backward half of an engine.

    Attributes:
        units: the root's own first.
        state: the backward in progress.
        forwards: depth of forward calls in progress.
        pending: forwards of the root whose outputs no backward has reached.
        entered: those that the backward in progress goes through.
        thread: the one that is inside of a forward.
        is_lazy: execution is: a compiler decides when values exist (see ``lazy.py``).
        after: where execution is lazy, what the next gathers have to wait for.
    """

    def __init__(self, units: Sequence[Unit], after_backward: Callable[[], None] | None) -> None:
        self.units = list(units)
        self._after_backward = after_backward
        self.state = BackwardState(self._end_of_backward)
        self.forwards = 0
        self.pending: weakref.WeakSet[ForwardGraph] = weakref.WeakSet()
        self.entered: list[ForwardGraph] = []
        self.thread = NO_THREAD
        # of the last complete training forward:
        self._order: list[Unit] = []  # calls as they began
        self._plan = BackwardPlan((), (), (), (), ())
        self._frozen = FrozenUnits()
        # of the backward in progress:
        self._is_planned = True  # it goes through one forward: see the note
        self._passed = -1  # position up to which it has come
        self._next_gather = 0
        self._next_reduction = 0
        self._in_flight: list[Unit] = []
        self._deferred: list[Unit] = []  # complete, as far as re-entrant checkpoints inside of them let know
        self._kept: list[FlatParam] = []  # gathered until backward ends
        self._creates_graph = False
        self._held: list[FlatParam] = []  # gathered for the graphs of gradients
        self._locked: list[FlatParam] = []  # gathered from the end of forward for backward
        self._needs_one_order = any(f.group.backend.one_order for u in self.units for f in u.flats)
        shared = [f for u in self.units for f in u.flats if f.group.world_size > 1]
        self._first_of_group = list({f.group: f for f in reversed(shared)}.values())
        self.is_lazy = any(not f.group.backend.has_storage for u in self.units for f in u.flats)
        self.after: list[torch.Tensor] = []
        self._last_reduced: list[torch.Tensor] = []

    def begin_backward(self) -> None:
        """A backward was noticed, from inside of it.

        Raises:
            LifecycleError: it builds a graph where that is not possible, or goes through one that is too old.
        """
        check_backward(self.units[0])
        self._creates_graph = torch.is_grad_enabled()  # in a backward: create_graph=True
        if self._creates_graph and self.is_lazy:
            self._refuse_graph(self.units)
        self.state.begin()
        for flat in self._held:
            if flat.held_at not in (None, flat.version):
                raise changed_since_forward(flat)
        if not self.state.accumulating:
            for flat in self._first_of_group:  # else another root's reductions could be met
                flat.group.channel("parameters").agree(f"backward through {flat.label}")
        if self._locked:
            self._unlock(self._locked)
        self._is_planned = len(self.pending) <= 1 and not self._held
        self._passed = -1
        self._next_gather = self._next_reduction = 0
        self._deferred = []
        for unit in self.units:
            unit.forget_if_cleared()

    def reach(self, unit: Unit, gradient: torch.Tensor | None) -> None:
        """Backward is about to enter a unit, with a gradient of its outputs."""
        if self.is_lazy and gradient is not None:
            self.after = [gradient, *self._last_reduced]
        if self.state.task == NO_BACKWARD:
            if self.forwards:
                check_one_thread(self, "backward")
            self.begin_backward()
        elif self.state.thread != this_thread():
            check_one_thread(self, "backward")
        with unit.ranges.backward():
            pass  # traces show where it begins
        for graph in self.entered:
            for flat in unit.flats:
                if graph.versions.get(flat, -1) not in (-1, sum(map(_version_of, flat.versioned))):
                    raise changed_since_forward(flat)
        if self._deferred:
            self._complete_deferred(unit)
        unit.task = current_backward()
        while self._passed < unit.position:
            self._pass()
        self._gather(unit)
        unit.finish_gather()

    def _gather(self, unit: Unit) -> None:
        """Gathers a unit for backward, if it is not.

        What several units need stays until backward ends: when the last of them is through may differ between ranks,
        and so would whether the next one finds it gathered.
        """
        if not unit.is_held:
            unit.start_gather()
        if self._creates_graph:
            for flat in unit.needs:
                flat.hold()
            self._held += [f for f in unit.needs if f.held_at is not None and f not in self._held]
        for flat in unit.needs:
            if flat.is_borrowed and flat not in self._kept:
                flat.start_gather()
                self._kept.append(flat)

    def leave(self, unit: Unit) -> None:
        """Backward has left a call of a unit whose gradients, if any, are there."""
        if self._is_planned and self._order.count(unit) == 1:  # else it may come back on some ranks
            unit.release()

    def _pass(self) -> None:
        """Backward enters the next unit of the plan, or passes it by."""
        self._passed += 1
        if self._is_planned and not self.state.accumulating:
            for unit in self._plan.reductions[self._next_reduction : self._plan.due[self._passed]]:
                self._next_reduction += 1
                self._send(unit)
                if unit.waiting and not unit.is_entered:
                    unit.release()
        self._gather_until(self._plan.until[self._passed])

    def _gather_until(self, position: int) -> None:
        for unit in self._plan.gathers[self._next_gather : position]:
            if unit.is_undecided:
                self._frozen.settle()
            if unit.goes_backward:
                self._gather(unit)
        self._next_gather = max(self._next_gather, position)

    def _gather_again(self, unit: Unit) -> None:
        """Gathers a unit whose activations are computed anew, after what comes before it."""
        position = unit.position
        if position >= 0:
            while self._passed < self._plan.again[position]:
                self._pass()
            if position >= self._next_gather:  # in a checkpoint that forward did not show
                self._gather_until(self._plan.until[position])
        self._gather(unit)

    def complete(self, unit: Unit) -> None:
        """All gradients of a unit are there."""
        if self._creates_graph:
            self._refuse_graph([unit])
        if not unit.is_entered:
            unit.release()
        if self.state.accumulating:
            unit.widen_local_gradients()
        else:
            self._send_ready()

    def defer(self, unit: Unit) -> None:
        """All gradients of a unit are there, but more may be added to them while backward is inside of the unit."""
        self._deferred.append(unit)

    def _complete_deferred(self, entered: Unit) -> None:
        """Backward enters a unit, and so has left those that this one is no part of."""
        deferred, self._deferred = self._deferred, []
        for unit in deferred:
            if f"{entered.name}.".startswith(f"{unit.name}." if unit.name else ""):
                self._deferred.append(unit)
            else:
                self.complete(unit)

    def _send_ready(self) -> None:
        if not self._is_planned and self._needs_one_order:
            return
        order, due, following = self._plan.reductions, self._plan.due, self._passed + 1
        limit = due[following] if self._is_planned and following < len(due) else len(order)
        while self._next_reduction < limit:
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
        self._make_room(unit)
        unit.send()
        self._in_flight.append(unit)

    def _make_room(self, unit: Unit) -> None:
        """One reduction is in flight at a time; see [Note: several forwards] for more than one."""
        while self._in_flight:
            may_wait = self._is_planned or self._needs_one_order or unit in self._in_flight
            if not may_wait and not self._in_flight[0].is_reduced():
                return
            self._receive()

    def _receive(self) -> None:
        unit = self._in_flight.pop(0)
        unit.receive()
        if self.is_lazy:
            self._last_reduced = [f.param.grad for f in unit.flats if f.param.grad is not None]

    @torch.no_grad()
    def _end_of_backward(self) -> None:
        try:
            with self.units[0].ranges.finish():
                self._finish_backward()
        except BaseException:
            self._abandon()
            raise
        finally:
            self.after = self._last_reduced = []
            self.entered = []
            if self._held:
                self._lock(self._held)
        for unit in self.units:
            unit.end_backward()
        self.units[0].backwards += 1
        if self._after_backward is not None:
            self._after_backward()

    def _refuse_graph(self, units: Sequence[Unit]) -> None:
        """Raises LifecycleError if gradients of sharded parameters would be in a graph: reductions are in none."""
        for flat in (f for u in units if self.is_lazy or u.has_fired for f in u.flats):
            if not flat.store.is_whole:
                raise backward_with_graph(flat)

    def _finish_backward(self) -> None:
        if self._creates_graph:
            self._refuse_graph(self.units)
        gathers = self._plan.gathers
        while self._passed + 1 < len(gathers):  # other ranks may have reached them
            self._pass()
            gathers[self._passed].release()
        for unit in self.units:
            if unit.is_held:
                unit.release()
        self._release_kept()
        if self.state.accumulating:
            for unit in self.units:
                unit.note_local_gradients()
            return
        for unit in self._plan.reductions[self._next_reduction :]:
            self._send(unit)
        for unit in self.units:  # called outside of the root's forward, or twice in nested backwards
            if unit.has_local_gradients():
                self._send(unit)
        while self._in_flight:
            self._receive()

    def recover(self) -> None:
        """Forgets a backward that died of an exception."""
        if self.state.task != NO_BACKWARD:
            check_one_thread(self, "a call")
        if self.state.task != NO_BACKWARD and current_backward() == NO_BACKWARD:
            self.state.task = NO_BACKWARD
            self._abandon()
            for group in dict.fromkeys(f.group for u in self.units for f in u.flats):
                group.agree(DROPPED)

    def leave_step(self) -> None:
        """Leaves a step wherever it is, on this rank alone; nothing of it is left, and nothing in flight."""
        self.state.leave()
        self._abandon()
        self.pending.clear()  # the program may still hold them

    def _abandon(self) -> None:
        self.entered = []
        units, self._in_flight = self._in_flight, []
        for unit in units:
            with contextlib.suppress(RuntimeError):  # its memory is in use until it is through, or has failed
                unit.forget_reduction()
        for unit in self.units:
            unit.drop_local_gradients()
            unit.end_backward()
        self._release_kept()
        for flat in self._held:
            flat.drop()
        self._held = []

    def _release_kept(self) -> None:
        kept, self._kept = self._kept, []
        for flat in kept:
            flat.release()

    def _lock(self, flats: Sequence[FlatParam]) -> None:
        for flat in flats:
            flat.store.lock()
            self._locked.append(flat)

    def _unlock(self, flats: Sequence[FlatParam]) -> None:
        for flat in flats:
            if flat.store.state is LOCKED:
                flat.store.unlock()
        self._locked = [flat for flat in self._locked if flat.store.state is LOCKED]
