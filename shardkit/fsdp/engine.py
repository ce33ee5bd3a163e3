"""Runs the units of one root module: who is gathered when, and in which order gradients are reduced.

[Note: order] Ranks issue the same collectives in the same order because everything here follows the order in which
forward entered and left the units, which is the same on all ranks; ``backward_plan.py`` makes one order of a backward's
gathers and reductions of it. What differs between ranks (which parameters were used, where backward ends) can't change
it: a unit that is complete waits for its turn, one that is not when backward has left it is reduced as it is, and what
backward did not reach on this rank is gathered in its turn anyway, since other ranks may reach it.

[Note: several forwards] One backward may go through several forwards of the root (two views of a batch, the two losses
of a discriminator). A parameter's gradient is there when it has come back from all of them, so that leaving a unit says
nothing. Then gathers keep their order and so do reductions, but a unit is reduced when it is complete, and nobody waits
for a reduction before the end of backward: waiting for it in between could be for a rank that waits for a gather.

[Note: prefetch] While a unit computes, the next one is gathered: the next of the last forward's order, or in backward
the one before. So two units' parameters are full at a time, besides those that stay so.

[Note: what stays gathered] The root (by option) and the unit that was called last: backward begins with it. They are
gathered anew in each forward, for between forwards the shards change.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from ..errors import LifecycleError
from ..torch_seams.compiling import not_compiled
from ..torch_seams.hooks import (
    DROPPED,
    NO_BACKWARD,
    BackwardState,
    current_backward,
    surrounding_checkpoint,
    tensors_in,
)
from ..torch_seams.phases import Phase
from .backward_plan import BackwardPlan, End, plan_backward
from .flat_param import FlatParam
from .frozen import FrozenUnits
from .refusals import backward_with_graph, changed_since_forward, written_member
from .store import LOCKED
from .threads import NO_THREAD, check_one_thread, this_thread
from .tracing import check_backward
from .unit import Unit


class Watcher(Protocol):
    """Is told when backward reaches an output of a forward."""

    def enter_backward(self, gradient: torch.Tensor | None = None) -> None: ...


class ForwardGraph:
    """Watches the outputs of one forward of the root, and ends with what autograd keeps of it.

    Args:
        watcher: is told, too.
    """

    def __init__(self, engine: Engine, watcher: Watcher) -> None:
        self._engine, self._watcher = engine, watcher
        self.versions = {f: f.param._version for u in engine.units for f in u.flats if f.param.requires_grad}

    def enter_backward(self, gradient: torch.Tensor | None = None) -> None:
        """Backward reached an output of the root."""
        engine = self._engine
        if engine.state.task == NO_BACKWARD:
            engine.entered = []
        if self not in engine.entered:
            engine.entered.append(self)
        self._watcher.enter_backward(gradient)
        self._engine.pending.discard(self)


class Engine:
    """Schedules gathering and reduction for all units below one root.

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

    def __init__(
        self, units: Sequence[Unit], prefetch: int = 1, after_backward: Callable[[], None] | None = None
    ) -> None:
        self.units = list(units)
        self._after_backward = after_backward
        self.state = BackwardState(self._end_of_backward)
        self.forwards = 0
        self.pending: weakref.WeakSet[ForwardGraph] = weakref.WeakSet()
        self.entered: list[ForwardGraph] = []
        self.thread = NO_THREAD
        self._prefetch = prefetch
        self._recording = False
        # of the last complete training forward:
        self._order: list[Unit] = []  # calls as they began
        self._order_of_ends: list[End] = []
        self._checkpoints: list[int] = []  # of each call the checkpoint around it, by number; -1 for none
        self._plan = BackwardPlan((), (), (), (), ())
        self._frozen = FrozenUnits()
        # of the one that runs:
        self._calls: list[Unit] = []
        self._ends: list[End] = []
        self._around: list[Any] = []
        self._replan = False
        # of the backward in progress:
        self._is_planned = True  # it goes through one forward: see the notes
        self._passed = -1  # position up to which it has come
        self._next_gather = 0
        self._next_reduction = 0
        self._in_flight: list[Unit] = []
        self._kept: list[FlatParam] = []  # gathered until backward ends
        self._locked: list[FlatParam] = []  # gathered from the end of forward for backward
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
    def before_forward(self, unit: Unit, inputs: Any) -> None:
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
        else:
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
                    raise written_member(flat)

    def _lock_held(self) -> None:
        """Forward is over: what stays gathered is for backward, or for nobody, and not for the program."""
        for unit in self.units:
            if unit.is_held:
                for flat in unit.needs:
                    flat.store.lock()
                    self._locked.append(flat)

    def _unlock(self, flats: Sequence[FlatParam]) -> None:
        for flat in flats:
            if flat.store.state is LOCKED:
                flat.store.unlock()
        self._locked = [flat for flat in self._locked if flat.store.state is LOCKED]

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

    # ------------------------------------------------------------ backward
    def begin_backward(self) -> None:
        """A backward was noticed, from inside of it.

        Raises:
            LifecycleError: it builds a graph, which would need parameters after it that are given back.
        """
        check_backward(self.units[0])
        if torch.is_grad_enabled():  # in a backward: create_graph=True
            flats = [f for u in self.units for f in u.flats if not f.store.is_whole]
            if flats:
                raise backward_with_graph(flats[0])
        self.state.begin()
        if self._locked:
            self._unlock(self._locked)
        self._is_planned = len(self.pending) <= 1
        self._passed = -1
        self._next_gather = self._next_reduction = 0
        for unit in self.units:
            for local in unit.local:
                local.forget_if_cleared()

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
        for graph in self.entered:
            for flat in unit.flats:
                if flat in graph.versions and graph.versions[flat] != flat.param._version:
                    raise changed_since_forward(flat)
        while self._passed < unit.position:
            self._pass()
        self._gather(unit)
        unit.finish_gather()

    def _gather(self, unit: Unit) -> None:
        """Gathers a unit for backward, if it is not.

        What several units need stays until backward ends: when the last of them is through may differ between ranks,
        and so would whether the next one finds it gathered.
        """
        unit.start_gather()
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
        if not unit.is_entered:
            unit.release()
        if not self.state.accumulating:
            self._send_ready()

    def _send_ready(self) -> None:
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
        with Phase("shardkit::reduce-scatter"):
            self._make_room(unit)
            unit.send()
            self._in_flight.append(unit)

    def _make_room(self, unit: Unit) -> None:
        """One reduction is in flight at a time; see [Note: several forwards] for more than one."""
        while self._in_flight:
            if not self._is_planned and unit not in self._in_flight and not self._in_flight[0].is_reduced():
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
            self._finish_backward()
        except BaseException:
            self._abandon()
            raise
        finally:
            self.after = self._last_reduced = []
            self.entered = []
        for unit in self.units:
            unit.end_backward()
        if self._after_backward is not None:
            self._after_backward()

    def _finish_backward(self) -> None:
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

    def _abandon(self) -> None:
        self.entered = []
        units, self._in_flight = self._in_flight, []
        for unit in units:
            with contextlib.suppress(RuntimeError):  # its memory is in use until it is through, or has failed
                unit.receive()
        for unit in self.units:
            unit.drop_local_gradients()
            unit.end_backward()
        self._release_kept()

    def _release_kept(self) -> None:
        kept, self._kept = self._kept, []
        for flat in kept:
            flat.release()

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


def frozen_behind_trainable(calls: Sequence[Unit]) -> list[Unit]:
    """Frozen units one of whose calls began after that of a trainable unit (the one around it, maybe)."""
    first = next((k for k, unit in enumerate(calls) if unit.is_trainable), len(calls))
    return [unit for unit in dict.fromkeys(calls[first:]) if not unit.is_trainable]


def _numbered(checkpoints: list[Any]) -> list[int]:
    """Numbers for objects, in order of appearance; -1 for None."""
    numbers: dict[int, int] = {}
    return [-1 if c is None else numbers.setdefault(id(c), len(numbers)) for c in checkpoints]
