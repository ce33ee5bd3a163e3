"""Runs the units of one root module: who is gathered in forward and backward, and in which order gradients are reduced.

[Note: order] Ranks issue the same collectives in the same order because everything here follows the order in which
forward entered and left the units, which is the same on all ranks. What differs between ranks (which parameters were
used, where backward ends) can't change it: a unit that is complete waits for its turn, one that is not when backward
has left it is reduced as it is, and what backward did not reach on this rank is gathered in its turn anyway, since
other ranks may reach it.

[Note: one order] Gathers and reductions wait for all ranks. If one rank issues a gather before a reduction and another
one after it, each may wait for what the other has not issued: then both wait for ever. What is ready when may differ
between ranks. So nothing is issued because it is ready, but because its turn has come in an order that is made of the
calls of forward (:func:`plan_backward`). A rank that lacks a gradient when its turn has come says so in what it sends;
a rank whose backward ends early goes on through the order without computing.

Backward passes the calls of forward in the opposite order: it enters a unit where its call ended, and has left it
where its first call began. So on entering the unit at ``position``, backward

1. reduces what it has left: the first ``due[position]`` of ``reductions``;
2. gathers up to ``until[position]``: this unit, those whose activations are computed anew together with its own, and
   ``prefetch`` more.

[Note: prefetch] While a unit computes, the next one is gathered: the next of the last forward's order, or in backward
the one before. So two units' parameters are full at a time, besides those that stay so.

[Note: small units] A message costs the same whether it brings 4 KiB or 64. So units that follow each other, and are
small together, are gathered together when the first of them is asked for, and reduced together when the last is due.

[Note: what stays gathered] The root (by option) and the unit that was called last: backward begins with it. They are
gathered anew in each forward, for between forwards the shards change.

[Note: frozen values] What is not trained need not be gathered again: with ``ReshardPolicy(frozen="keep")`` its first
gather counts a user that never leaves, until shards change. Ranks see the same changes, so they gather it together.
With ``frozen="host"`` what the first gather brought is copied to the host, and later ones copy it back.

[Note: several forwards] One backward may go through several forwards of the root (two views of a batch, the two losses
of a discriminator). A parameter's gradient is there when it has come back from all of them, so that leaving a unit says
nothing. Then gathers keep their order and so do reductions, but a unit is reduced when it is complete, and nobody waits
for a reduction before the end of backward: waiting for it in between could be for a rank that waits for a gather. Where
collectives of all channels need one order, none is issued before the end either.

[Note: several roots] One backward may go through several roots, and through modules of ShardedDDP, whose orders meet.
When one has come to its end may differ between ranks: one may lack a gradient of it until the end of backward. So where
backward reaches another one, whose forward ended before the first one's began, the rest of the first one's order is
issued. Where that is not so (a discriminator's forwards on real data and, through the generator, on made ones), nothing
says when the first one is through, and the other one's reductions wait for the end of backward, as all ranks' do. Ranks
tell each other which modules of ShardedDDP they have come through: one that has not would send other gradients next.

[Note: graphs of gradients] A backward with ``create_graph=True`` (a penalty on gradients of inputs, forces) leaves a
graph that needs parameters, and no hook tells when a later backward comes to it. So the units that it went through stay
gathered from then on, through any number of backwards and forwards, until the shards change: until the step.

[Note: frozen units] A trainable unit is gathered for backward on all ranks, whatever single ones detached. Doing so
with frozen ones, too, would gather a frozen encoder for nothing, since nothing in front of it needs a gradient. Only a
rank's own graph tells whether backward goes through, and ranks may have other graphs. So they tell each other, in one
exchange of a byte a unit after each forward, whose result is looked at when backward comes near such a unit.

[Note: threads] One thread at a time runs the units of a root: another one would free what the first computes with.

[Note: tracers] ``torch.compile`` runs around what gathers and reduces. Others record a forward or a backward as one
graph of tensors: of a sharded module that would be a rank's part, with collectives left out. They are refused by name,
on all ranks.

[Note: common order] Inside of ``uneven`` not all ranks call the same units: one is through with its micro-batches, one
drops a layer or has no token for an expert, the forward of one raises. So all of them keep to one order. A rank that
calls a unit further on first gathers those in between, and gives them back; so it does with the rest of a unit that it
leaves, and a rank without a micro-batch with all units. Backward follows the plan of the whole order in any case
([Note: order]): what a rank has not called is gathered and reduced there in its turn, with nothing in it.

The order is learned as the first forward runs, one of training ones and one of evaluations. At each step ranks tell
each other which unit they are about to enter. The first of them, as the model lists units, is entered by all, until
nobody asks for another one: then all leave the unit that they are in. A unit that nobody has called yet has the place
where the model lists it. What is called in another order later is an error, after which the order is learned anew.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
import weakref
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple, NoReturn

import torch

from ..backend import Group, ReduceOp, Work, not_compiled
from ..checks import facts_of_all
from ..errors import LifecycleError
from ..layout import buckets_by_size
from ..optimizers.shards import IN_BACKWARD, step_in_backward
from ..oss.exchange import GradientExchange
from ..torch_seams.hooks import (
    DROPPED,
    NO_BACKWARD,
    BackwardState,
    current_backward,
    frame_of_backward,
    in_compiled_autograd,
    is_noted_by_checkpoint,
    moments,
    surrounding_checkpoint,
    tensors_in,
    unnoted,
)
from ..wrapping.activations import Activations
from .flat_param import GATHERING, LOCKED, FlatParam, Landing, Store, find_kept_views, start_together
from .originals import changed_since_forward, written_original
from .unit import ROW, SmallUnits, Unit, UnitCall, refuse_steps, rounds_of, rows_of_small

NO_THREAD = 0
this_thread = threading.get_ident


def check_one_thread(engine: Engine, what: str) -> None:
    """Raises LifecycleError if another thread is inside of a forward or backward of this root.

    Device threads, which run parts of a backward on behalf of the thread that called it, are not taken for others.
    """
    me, task = this_thread(), current_backward()
    is_called_here = task == NO_BACKWARD or frame_of_backward(sys._getframe()) is not None
    if engine.thread not in (NO_THREAD, me) and is_called_here:
        raise _refusal(engine.thread, "forward", what)
    other = engine.state.thread
    if engine.state.task in (NO_BACKWARD, task) or other == me:
        return
    of_other = sys._current_frames().get(other)
    if frame_of_backward(of_other) is not None and is_called_here:
        raise _refusal(other, "backward", what)


def _refusal(other: int, doing: str, what: str) -> LifecycleError:
    names = {t.ident: t.name for t in threading.enumerate()}
    return LifecycleError(
        f"{what} in thread {threading.current_thread().name!r} while thread {names.get(other, other)!r} is inside of "
        f"a {doing} of the same FSDP module: they would free each other's parameters. Let one thread at a time run "
        "it, the same one first on all ranks"
    )


EXPORT = "torch.export._trace"
# Of this thread from torch 2.14 on, of the process before.
_fx: Any = torch.fx._symbolic_trace
fx_tracing = getattr(_fx, "_get_is_fx_tracing", None) or partial(getattr, _fx, "_is_fx_tracing_flag")
jit_tracing = torch._C._get_tracing_state
transform_level = torch._C._functorch.maybe_current_level
_INSTEAD = (
    "Do it with a module that is not wrapped: build the model anew and load this one's state_dict() into it. "
    "torch.compile works with FSDP modules"
)


def check_forward(unit: Unit) -> None:
    """Raises LifecycleError where a forward is recorded by something that can't know of gathering."""
    if jit_tracing() is not None:
        raise refusal(unit, "torch.jit.trace (torch.onnx.export too)")
    if torch.compiler._is_exporting_flag:
        raise refusal(unit, "torch.export (torch.onnx.export too)")
    if fx_tracing():
        raise refusal(unit, "tracing with torch.fx (symbolic_trace, make_fx)")
    if in_compiled_autograd():
        instead = "torch.compile without it (torch._dynamo.config.compiled_autograd = False)"
        raise refusal(unit, "compiled autograd", instead)
    if transform_level() is not None and not all(flat.store.is_whole for flat in unit.needs):
        keys = {level.key() for level in torch._C._functorch.get_interpreter_stack() or []}
        kinds = torch._C._functorch.TransformType
        if keys & {kinds.Grad, kinds.Jvp}:
            instead = "torch.autograd.grad with respect to inputs"
            raise refusal(unit, "torch.func.grad (vjp, jvp, jacrev, hessian, ...)", instead)


def refusal(unit: Unit, what: str, instead: str = "") -> LifecycleError:
    """Returns the error, which says what to call instead."""
    remedy = f"Use {instead}, or do it with a module that is not wrapped" if instead else _INSTEAD
    where = "FSDP" if unit.group is None else f"rank {unit.group.ranks[unit.group.rank]}"
    return LifecycleError(
        f"{where}: {what} of an FSDP module ({unit.name or 'the root'}) is not possible: its parameters are "
        f"gathered and given back while it runs. {remedy}"
    )


class BackwardPlan(NamedTuple):
    """See the note on top.

    Attributes:
        gathers: units in the order in which backward enters them first; a unit's index here is its position.
        reductions: trainable units in the order in which backward leaves them for good.
        due: for each position, how many reductions come before it.
        until: for each position, up to where units are gathered on entering it (exclusive).
        again: for each position, where backward is when the unit's activations are computed anew: at the first unit of
            what is computed together; -1 where they are not.
    """

    gathers: Sequence[Unit]
    reductions: Sequence[Unit]
    due: Sequence[int]
    until: Sequence[int]
    again: Sequence[int]


def plan_backward(
    calls: Sequence[Unit],
    ends: Sequence[tuple[Unit, int]],
    recomputed: Sequence[int],
    units: Iterable[Unit],
    prefetch: int,
) -> BackwardPlan:
    """Returns the plan for a forward.

    Args:
        calls: units in the order in which their calls began.
        ends: the same calls as they ended, each with how many calls had begun by then.
        recomputed: for each call the number of the checkpoint that runs it again in backward, -1 for none.
        units: all units of the root, called or not.
        prefetch: how many units are gathered ahead.
    """
    entered: dict[Unit, int] = {}
    left: dict[Unit, int] = {}
    begun, time = len(calls), 0
    for ended, begun_before in reversed(ends):
        while begun > begun_before:
            begun -= 1
            left[calls[begun]] = time = time + 1
        time += 1
        entered.setdefault(ended, time)
    for unit in reversed(calls[:begun]):
        left[unit] = time = time + 1

    gathers = list(entered)
    leaving = _times_of_reductions(units, left)
    reductions = sorted(leaving, key=lambda unit: (leaving[unit], left.get(unit, 0)))
    times = [leaving[unit] for unit in reductions]
    due = [bisect_left(times, entered[unit]) for unit in gathers]
    together = _computed_together(gathers, calls, recomputed)
    again = [min(positions, default=-1) for positions in together]
    until: list[int] = []  # whole rows of small ones
    furthest, end_of = 0, _ends_of_rows(gathers)
    for k, positions in enumerate(together):
        furthest = max(furthest, k, *positions)
        until.append(end_of[min(furthest + prefetch, len(gathers) - 1)])
    return BackwardPlan(gathers, reductions, due, until, again)


def _times_of_reductions(units: Iterable[Unit], left: dict[Unit, int]) -> dict[Unit, int]:
    """Finds when backward has left all units that use a trainable unit's parameters."""
    users: dict[int, int] = {}  # of each flat parameter, by id
    for unit, time in left.items():
        for flat in (*unit.flats, *unit.borrowed):
            users[id(flat)] = max(time, users.get(id(flat), 0))
    found = {}
    for unit in units:
        time = max((users.get(id(flat), 0) for flat in unit.flats), default=0)
        if time and unit.is_trainable:
            found[unit] = time
    return found


def _computed_together(
    gathers: Sequence[Unit], calls: Sequence[Unit], recomputed: Sequence[int]
) -> list[set[int]]:
    """Lists for each position those whose activations are computed anew with its own; empty where none are."""
    position = {unit: k for k, unit in enumerate(gathers)}
    spans: dict[int, list[int]] = {}
    for index, checkpoint in enumerate(recomputed):
        if checkpoint >= 0:
            spans.setdefault(checkpoint, []).append(index)
    together: list[set[int]] = [set() for _ in gathers]
    for indices in spans.values():
        span = {position[unit] for unit in calls[indices[0] : indices[-1] + 1]}
        for k in span:
            together[k] |= span
    return together


def _ends_of_rows(units: Sequence[Unit]) -> list[int]:
    """Finds for each position where the row of small units that it is in ends (exclusive)."""
    sizes = [unit.small_bytes for unit in units]
    rows = buckets_by_size(sizes, ROW, [None if size < 0 else "values" for size in sizes])
    return [row[-1] + 1 for row in rows for _ in row]


_version_of = attrgetter("_version")


class ForwardGraph:
    """Watches the outputs of one forward of the root, and ends with what autograd keeps of it.

    Args:
        watcher: is told, too.
    """

    def __init__(self, engine: Engine, watcher: Unit | UnitCall) -> None:
        self._engine, self._watcher = engine, watcher
        self.versions = {
            f: sum(map(_version_of, f.versioned)) for u in engine.units for f in u.flats if f.trains
        }
        engine.pending.add(self)

    @not_compiled
    def enter_backward(self, gradient: torch.Tensor) -> None:
        """Notes that backward reached an output of the root."""
        engine = self._engine
        if engine.state.task == NO_BACKWARD:
            engine.entered = []
        if self not in engine.entered:
            engine.entered.append(self)
        self._watcher.enter_backward(gradient)
        engine.pending.discard(self)


class _Call:
    """A call of a unit, with those inside of it, computed anew in the checkpoint of this number; -1 for none."""

    def __init__(self, unit: Unit, checkpoint: int = -1) -> None:
        self.unit, self.checkpoint = unit, checkpoint
        self.inside: list[_Call] = []

    def __iter__(self) -> Iterator[_Call]:
        yield self
        for call in self.inside:
            yield from call


class CommonOrder:
    """Keeps a rank's forwards to the order that all ranks share; see [Note: common order].

    Attributes:
        groups: all ranks that have a part of the batch, as one group or as two (of shards and of replicas).
        error: what the forward that has ended did, and no order has room for.
    """

    groups: Sequence[Group] = ()

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.forget()

    def forget(self) -> None:
        """Has the order learned anew; on all ranks."""
        self._known: dict[bool, _Call] = {}  # the roots' calls, of training forwards and of evaluations
        self._silent: set[Unit] = set()  # trainable, and called without gradients
        self.expect()

    def expect(self) -> None:
        """Notes that ranks are about to run a forward."""
        # that this rank is inside of, and what comes in them
        self._open: list[tuple[_Call, list[_Call]]] = []
        self._is_through = False
        self.error: LifecycleError | None = None

    # ------------------------------------------------------------ what this rank calls
    def enter(self, unit: Unit) -> None:
        """Takes part in what comes before a unit that this rank is about to enter (collective)."""
        if not self._open:
            if unit is self._engine.units[0]:
                self._trains = self._engine.recording
                self._root = self._known.get(self._trains) or _Call(unit)
                self._open.append((self._root, self._root.inside.copy()))
            return
        call = self._next(unit)
        while call is not None and call.unit is not unit:
            self._attend(call)
            call = self._next(unit)
        if call is None:
            raise self._refusal(f"calls {unit.name!r} where others are through with it or don't come to it")
        self._open.append((call, call.inside.copy()))

    def leave(self, unit: Unit) -> None:
        """Takes part in what is left of a unit that this rank is about to leave (collective)."""
        if not self._open:
            return
        if self._open[-1][0].unit is not unit:
            raise self._refusal(
                f"leaves {unit.name or 'the model'!r} after an error inside of it that was caught"
            )
        self._go_through()
        if not self._open:
            self._is_through = True
            if not self._trains:
                self._note()

    def _refusal(self, what: str) -> LifecycleError:
        group = self.groups[0]
        return LifecycleError(
            f"rank {group.ranks[group.rank]} {what}. Inside of uneven() all ranks keep to one order of units, that of "
            "the first forward: any of them may be left out, and none called again or earlier. The next block learns "
            "the order anew; for any order use uneven(model, once=True)"
        )

    # ------------------------------------------------------------ what others call
    def follow(self, trains: bool) -> None:
        """Takes part in a forward, or in what is left of one that raised here, without computing (collective)."""
        if self._is_through:
            return
        engine = self._engine
        with torch.set_grad_enabled(trains):
            if self._open:
                engine.go_on(len(self._open), trains)
            else:
                engine.begin_forward()
                engine.before_forward(engine.units[0], ())
            while self._open:
                engine.after_forward(self._open[-1][0].unit)
            engine.end_forward()

    def _attend(self, call: _Call) -> None:
        self._open.append((call, call.inside.copy()))
        self._engine.attend(call.unit, self._go_through)

    def _go_through(self) -> None:
        """Takes part in what is left of the unit that is open, and closes it."""
        while (call := self._next(None)) is not None:
            self._attend(call)
        self._open.pop()

    def _next(self, wanted: Unit | None) -> _Call | None:
        """Returns what all ranks enter next, if this one wants to enter that; None: they leave what is open."""
        call, rest = self._open[-1]
        if self._trains in self._known:
            return rest.pop(0) if rest else None
        units = self._engine.units
        own = len(units) if wanted is None else units.index(wanted)
        first = min(facts_of_all(self.groups, own, label="uneven(): which unit comes next"))
        if first == len(units):
            return None
        call.inside.append(_Call(units[first]))
        return call.inside[-1]

    # ------------------------------------------------------------ what was learned
    def settle(self, checkpoints: Sequence[int]) -> list[int]:
        """Sees to it that all ranks make the same plan of a training forward that has ended (collective).

        Args:
            checkpoints: for each call the number of the one around it on this rank, -1 for none.

        Returns:
            Those of all ranks together.
        """
        calls = list(self._root)
        trained = [unit for unit in self._engine.units if unit.is_trainable]
        if self._root is not self._known.get(True):
            own = [*checkpoints], [unit.is_reached for unit in trained]
            said = facts_of_all(self.groups, own, label="uneven(): what was called")
            for call, number in zip(calls, _joined([each for each, _ in said]), strict=True):
                call.checkpoint = number
            called = {call.unit for call in calls}
            for k, unit in enumerate(trained):
                if unit in called and not any(reached[k] for _, reached in said):
                    self._silent.add(unit)
            self._note()
        numbers: dict[int, int] = {}
        others = [
            call.unit.name
            for number, call in zip(checkpoints, calls, strict=True)
            if number >= 0
            and (call.checkpoint < 0 or numbers.setdefault(number, call.checkpoint) != call.checkpoint)
        ]
        others += [unit.name for unit in self._silent if unit.is_trainable and unit.is_reached]
        if others:
            self.error = self._refusal(f"computes {others[0]!r} anew, or with gradients, where others don't")
        for unit in trained:
            unit.is_reached = unit not in self._silent
        return [call.checkpoint for call in calls]

    def _note(self) -> None:
        """Notes the order that this forward has shown, with places for units that nobody has called."""
        units = self._engine.units
        place = {unit: k for k, unit in enumerate(units)}
        called = {call.unit for call in self._root}
        for unit in units:
            if unit in called:
                continue
            parents = [
                u for u in units if u is not unit and f"{unit.name}.".startswith(u.name and f"{u.name}.")
            ]
            parent = max(parents, key=lambda u: len(u.name))
            for call in [call for call in self._root if call.unit is parent]:
                before = sum(place[each.unit] < place[unit] for each in call.inside)
                # it may be computed anew by itself, or with what it is in
                number = max(each.checkpoint for each in self._root) + 1
                number = number if call.checkpoint < 0 else call.checkpoint
                call.inside[before:before] = [_Call(unit, number) for _ in range(unit.doors)]
        self._known[self._trains] = self._root


def _joined(ranks: Sequence[Sequence[int]]) -> list[int]:
    """Numbers calls by the checkpoints around them, of which those that share a call on any rank are one."""
    inside, goes_on = set[int](), set[int]()
    for numbers in ranks:
        for number in set(numbers) - {-1}:
            span = [k for k, each in enumerate(numbers) if each == number]
            inside.update(range(span[0], span[-1] + 1))
            goes_on.update(range(span[0] + 1, span[-1] + 1))
    found, last = [], -1
    for k in range(len(ranks[0])):
        last += k not in goes_on
        found.append(last if k in inside else -1)
    return found


class Engine:
    """Runs all units below one root.

    Args:
        prefetch: how many units are gathered ahead.
        after_backward: called at the end of each.

    Attributes:
        units: the root's own first.
        state: the backward in progress.
        forwards: depth of forward calls in progress.
        in_place: frames of those that torch calls of modules sharded in place, and what forgets them.
        pending: forwards of the root whose outputs no backward has reached.
        entered: those that the backward in progress goes through.
        thread: the one that is inside of a forward.
        is_lazy: execution is: a compiler decides when values exist (see ``forward.py``).
        after: where execution is lazy, what the next gathers have to wait for.
        rounds: counts backwards of a step, where the order of sums is fixed.
        activations: of the forward that runs, those that go to the host.
        common: the order that ranks keep to inside of ``uneven``.
        in_common: they are inside.
        is_alone: everything stays gathered, and no forward or backward meets other ranks.
        needs_one_order: so do gathers and reductions of all units, with each other.
    """

    in_common = is_alone = False

    def __init__(
        self, units: Sequence[Unit], prefetch: int = 1, after_backward: Callable[[], None] | None = None
    ) -> None:
        self.units = list(units)
        self._after_backward = after_backward
        self.common = CommonOrder(self)
        self.state = BackwardState(self._end_of_backward)
        self.forwards = 0
        self.in_place: list[tuple[Any, Callable[[], None]]] = []
        self.pending: weakref.WeakSet[ForwardGraph] = weakref.WeakSet()
        self.entered: list[ForwardGraph] = []
        self.thread = NO_THREAD
        self._prefetch = prefetch
        # of the forward that runs:
        self.recording = False
        self._calls: list[Unit] = []
        self._ends: list[tuple[Unit, int]] = []
        self._around: list[object] = []
        self._replan = False
        # of the last complete training forward:
        self._order: list[Unit] = []  # calls as they began
        self._ahead: list[int] = []  # for each, up to where units are gathered then (exclusive)
        self._order_of_ends: list[tuple[Unit, int]] = []
        self._checkpoints: list[int] = []  # of each call the checkpoint around it, by number; -1 for none
        self._plan, self._way = BackwardPlan((), (), (), (), ()), ""
        self._reductions: list[Unit | SmallUnits] = []  # of the plan, small ones in rows
        self._due: list[int] = []  # of these, as the plan's
        self._frozen: dict[Group, list[Unit]] = {}  # of the plan, that may lie behind something trainable
        # exchanges that say which of them backward goes through: units, [units] on its way, what to wait for
        self._asked: list[tuple[list[Unit], torch.Tensor, Work]] = []
        # of the backward in progress:
        self._is_planned = True  # it goes through one forward: see the note
        self._at_end = False  # reductions are issued then
        self._passed = -1  # position up to which it has come
        self._next_gather = 0
        self._next_reduction = 0
        self._in_flight: list[Unit | SmallUnits] = []
        self.deferred: list[Unit] = []  # complete, as far as re-entrant checkpoints inside of them let know
        self._kept: list[FlatParam] = []  # gathered until backward ends
        self._creates_graph = False
        self._held: list[FlatParam] = []  # gathered for the graphs of gradients
        self._flats = [*dict.fromkeys(flat for unit in self.units for flat in unit.needs)]
        self.needs_one_order = any(
            u.comms.are_custom or f.group.backend.one_order for u in self.units for f in u.flats
        )
        shared = [f for u in self.units for f in u.flats if f.group.world_size > 1]
        self._first_of_group = list({f.group: f for f in reversed(shared)}.values())
        self.is_lazy = any(not f.group.backend.has_storage for u in self.units for f in u.flats)
        self.after: list[torch.Tensor] = []
        self._last_reduced: list[torch.Tensor] = []
        for unit in self.units:
            unit.run_by(self)
        self._keeping = [unit for unit in self.units if unit.keeps_frozen]
        # as backward leaves them
        self._on_host = [f for unit in reversed(self.units) for f in unit.flats if f.offloaded is not None]
        self._landing: list[Landing] = []  # of these, whose gradients are on their way
        self.set_accumulating([unit.accumulates for unit in self.units])
        self.rounds = rounds_of(self.units)
        self.activations: Activations | None = None

    # ------------------------------------------------------------ forward
    @not_compiled
    def begin_forward(self) -> None:
        """Begins the root's forward: what is gathered still is of an earlier one."""
        self.recover()
        for unit in self.units:
            unit.left = 0
            if unit.is_held and not (unit.keep_after_backward and unit.is_current()):
                unit.release()
            if unit.keeps_between:
                unit.forget_between()
        for flat in [*self._held]:  # what stays from step to step is freed where the shards have changed
            if flat.held_at != flat.version:
                flat.drop()
                self._held.remove(flat)
        for unit in self._keeping:
            unit.give_back_frozen(outdated=True)
        self.recording = torch.is_grad_enabled()
        if self.recording:
            self.state.began = next(moments)
            self._calls, self._ends, self._around = [], [], []
            is_first = not self.pending
            if is_first and self._asked:
                self._settle_frozen()
            for unit in self.units:
                self._replan = unit.notice_trainable() or self._replan
                if is_first:
                    unit.is_reached = False

    def _note_trained(self) -> str:
        """Notes what is trainable now: ranks on which something else is would reduce gradients of other sizes."""
        trained = bytes(trains for flat in self._flats for trains in flat.trainable)
        self.trained = f", {sum(trained)} of {len(trained)} parameters trainable ({zlib.crc32(trained):x})"
        return self.trained

    @not_compiled
    def before_forward(self, unit: Unit, inputs: object) -> None:
        """Gathers a unit for its forward on ``inputs``, and asks for the next one."""
        if torch._C._len_torch_dispatch_stack() and is_noted_by_checkpoint():
            with unnoted():
                return self.before_forward(unit, inputs)
        if self.is_lazy:
            self.after = tensors_in(inputs)
        self.forwards += 1
        in_backward = current_backward() != NO_BACKWARD
        if self.in_common and not in_backward:
            self.common.enter(unit)
        if not self.recording and not in_backward and (unit.gathered_at is None or not unit.is_current()):
            unit.release()  # what an earlier forward left gathered may be old
        for flat in unit.needs:
            if flat.store.state is LOCKED:
                flat.store.unlock()
        if in_backward and self.state.task != NO_BACKWARD:  # activations are computed anew
            self._gather_again(unit)
        elif not unit.is_held:
            unit.start_gather()
        if self.recording and not in_backward:
            self._record(unit)
        for flat in unit.needs:
            if flat.store.state is GATHERING:
                flat.store.finish()

    def _record(self, unit: Unit) -> None:
        """Notes a call of a training forward, and asks for what followed it the last time."""
        position = len(self._calls)
        self._calls.append(unit)
        checkpoint = None
        if not torch.is_grad_enabled() or torch._C._autograd._top_saved_tensors_default_hooks(True):
            checkpoint = surrounding_checkpoint()
        self._around.append(checkpoint)
        if checkpoint is not None:
            unit.is_reached = True
        order = self._order
        if position < len(order) and order[position] is unit:
            ahead = []
            for following in order[position + 1 : self._ahead[position]]:
                if not following.is_held:
                    ahead.append(following)
            if len(ahead) == 1:
                ahead[0].start_gather()
            elif ahead:
                self._gather_together(ahead)

    @not_compiled
    def after_forward(self, unit: Unit) -> None:
        """Frees what the unit gathered, unless backward will need it soon."""
        self.forwards -= 1
        if current_backward() != NO_BACKWARD:
            return
        if self.forwards == 0:
            self.thread = NO_THREAD  # now, for what follows may raise
        if self.in_common:
            self.common.leave(unit)
        unit.left += 1
        if self.recording:
            self._ends.append((unit, len(self._calls)))
            if unit.keep_after_forward:
                return
            calls, order = self._calls, self._order
            if len(calls) == len(order) and calls[-1] is unit and order[-1] is unit:
                return  # backward begins with it
        if unit.left >= unit.doors:  # else others of its modules follow
            unit.release(until_backward=self.recording)

    @not_compiled
    def end_forward(self) -> None:
        self.after = []
        if self.recording:
            self.state.ended = next(moments)
            self.recording = False
            self.state.is_due = not self.state.accumulating
            numbers: dict[int, int] = {}  # of checkpoints, in order of appearance
            checkpoints = [-1 if c is None else numbers.setdefault(id(c), len(numbers)) for c in self._around]
            self._around = []
            if self.in_common:
                checkpoints = self.common.settle(checkpoints)
            now = self._calls, self._ends, checkpoints
            if self._replan or now != (self._order, self._order_of_ends, self._checkpoints):
                self._order, self._order_of_ends, self._checkpoints = now
                self._make_plan()
            for unit in self._plan.gathers:
                unit.goes_backward = unit.is_reached
            if self._frozen and not self.is_alone:
                self._ask_frozen()
        self._lock_held()
        if not torch.is_grad_enabled() and not self.pending:
            find_kept_views(self._flats)
        for flat in self._flats:
            if flat.store.state is LOCKED and flat.written:
                raise written_original(flat)
        if self.in_common and self.common.error is not None:
            raise self.common.error

    def _lock_held(self) -> None:
        """Locks what stays gathered after forward: it is for backward, or for nobody, and not for the program."""
        held = map(attrgetter("needs"), filter(attrgetter("is_held"), self.units))
        kept = map(attrgetter("flats"), self._keeping)  # frozen values, for the next step
        for flat in itertools.chain(self._held, *held, filter(attrgetter("kept_at"), itertools.chain(*kept))):
            flat.store.lock()

    def _make_plan(self) -> None:
        self._replan = False
        for unit in self.units:
            unit.position = -1
        self._plan = plan_backward(
            self._order, self._order_of_ends, self._checkpoints, self.units, self._prefetch
        )
        for k, unit in enumerate(self._plan.gathers):
            unit.position = k
        # ranks compare it: what is gathered together, or stays so, does not tell which units forward called
        reduced = dict.fromkeys(self._plan.reductions)
        labels = [u.flats[0].label for u in reduced]
        others = [text if len(labels) < 9 else text.partition(", unit ")[2] for text in labels[1:]]
        left = [f"without {u.name}" for u in self.units if u.is_trainable and u not in reduced]
        self._way = ", ".join(["", *labels[:1], *others, *left])
        self._reductions = rows_of_small(self._plan.reductions)
        ends = [*itertools.accumulate(len(getattr(row, "units", (row,))) for row in self._reductions)]
        self._due = [bisect_right(ends, due) for due in self._plan.due]  # rows that backward has left
        ends = _ends_of_rows(self._order)
        self._ahead = [ends[min(k + self._prefetch, len(ends) - 1)] for k in range(len(ends))]
        self._settle_frozen()
        self._frozen = {}
        first = next((k for k, unit in enumerate(self._order) if unit.is_trainable), len(self._order))
        # frozen, and called after a trainable one (or inside of it)
        for unit in () if self.is_lazy else dict.fromkeys(self._order[first:]):
            if not unit.is_trainable and unit.group is not None and unit.group.world_size > 1:
                self._frozen.setdefault(unit.group, []).append(unit)

    def _ask_frozen(self) -> None:
        """Starts the exchange of what the forward that has just ended says (collective)."""
        for group, units in self._frozen.items():
            flags = torch.tensor([int(u.is_reached) for u in units], dtype=torch.uint8, device="cpu")
            flags = flags.to(group.backend.device())
            work = group.channel("control").all_reduce(
                flags, op=ReduceOp.MAX, async_op=True, label="which frozen units backward goes through"
            )
            self._asked.append((units, flags, work))
            for unit in units:
                unit.is_undecided = True

    def _settle_frozen(self) -> None:
        asked, self._asked = self._asked, []
        for units, flags, work in asked:
            work.wait()
            for unit, flag in zip(units, flags.tolist(), strict=True):
                unit.goes_backward = unit.goes_backward or bool(flag)
                unit.is_undecided = False

    @not_compiled
    def fail_forward(self, is_outermost: bool) -> None:
        self.forwards -= 1
        if is_outermost:
            self.forwards = 0
            self.recording = False
            self.after = []
            self._around = []
            self._lock_held()

    def forget_interrupted(self) -> None:
        """Ends forwards that nobody is inside of, as torch calls no hooks after KeyboardInterrupt and its like."""
        try:
            self.in_place[0][0].clear()
        except RuntimeError:  # it runs
            return
        while self.in_place:
            self.in_place.pop()[1]()

    def is_inside(self) -> bool:
        """Says whether a forward or backward runs: what an exception has left is none."""
        if self.in_place:
            self.forget_interrupted()
        return self.forwards > 0 or current_backward() != NO_BACKWARD

    # ------------------------------------------------------------ backward
    def begin_backward(self, by_gradient: bool = False) -> None:
        """Notes that a backward was noticed, from inside of it.

        Args:
            by_gradient: it may be inside of another root, which uses weights of this one.

        Raises:
            LifecycleError: it builds a graph where that is not possible, or goes through one that is too old.
        """
        self._creates_graph = torch.is_grad_enabled()  # in a backward: create_graph=True
        if self._creates_graph and self.is_lazy:
            self._refuse_graph(self.units)
        self.state.begin()
        for flat in self._held:
            if flat.held_at not in (None, flat.version):
                raise changed_since_forward(flat)
        others = list(map(attrgetter("owner"), self.state.before))  # a comprehension would be a call
        sends_last = not others or (not by_gradient and self.state.sends_last())
        if not self.state.accumulating:
            for flat in self._first_of_group:  # else another root's reductions could be met
                past = [o.name for o in others if isinstance(o, GradientExchange) and o.group is flat.group]
                behind = ", past " + ", ".join(past) if past else ""
                way = self._way + (self.trained or self._note_trained()) + behind
                flat.group.channel("parameters").agree(f"backward through {flat.label}{way}")
        for flat in self._flats:
            if flat.store.state is LOCKED:
                flat.store.unlock()
        if IN_BACKWARD in sys.modules and sys.modules[IN_BACKWARD].param_to_acc_grad_map.data:
            step_in_backward(listing.param for flat in self._flats for listing in flat.listings)
        self._is_planned = len(self.pending) <= 1 and not self._held
        self._at_end = not sends_last or (not self._is_planned and self.needs_one_order)
        self._passed = -1
        self._next_gather = self._next_reduction = 0
        self.deferred = []
        for unit in self.units:
            if unit.keeps_local:
                unit.forget_if_cleared()
        if self.rounds is not None:
            self.rounds.begin()

    @not_compiled
    def reach(self, unit: Unit, gradient: torch.Tensor) -> None:
        """Notes that backward is about to enter a unit, with a gradient of its outputs."""
        if self.is_lazy:
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
        deferred, self.deferred = self.deferred, []
        for left in deferred:  # they are complete as backward enters a unit that is no part of them
            is_part = f"{unit.name}.".startswith(f"{left.name}." if left.name else "")
            (self.deferred.append if is_part else self.complete)(left)
        unit.task = current_backward()
        while self._passed < unit.position:
            self._pass()
        self._gather(unit)
        for flat in unit.needs:
            if flat.store.state is GATHERING:
                flat.store.finish()

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

    def _gather_together(self, units: Sequence[Unit]) -> None:
        stores: list[Store] = []
        for unit in units:
            unit.start_gather(None if self.is_lazy else stores)
        start_together(stores, self.after)

    def leave(self, unit: Unit) -> None:
        """Notes that backward has left a call of a unit whose gradients, if any, are there."""
        is_last = self._is_planned and self._order.count(unit) == 1  # else it may come back on some ranks
        if is_last and not unit.keep_after_backward:
            unit.release()

    def _pass(self) -> None:
        """Enters the next unit of the plan in backward, or passes it by."""
        self._passed += 1
        if self._is_planned and not self._at_end and not self.state.accumulating:
            for row in self._reductions[self._next_reduction : self._due[self._passed]]:
                self._send(row)
                self._next_reduction += 1
                for unit in row.units if isinstance(row, SmallUnits) else (row,):
                    if unit.waiting and not unit.open_calls and not unit.keep_after_backward:
                        unit.release()
        self._gather_until(self._plan.until[self._passed])

    def _gather_until(self, position: int) -> None:
        units, ahead = self._plan.gathers[self._next_gather : position], []
        for unit in units:
            if unit.is_undecided:
                self._settle_frozen()
            if unit.goes_backward and not unit.is_held:
                ahead.append(unit)
        if len(ahead) > 1:
            self._gather_together(ahead)
        for unit in units:
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
        """Notes that all gradients of a unit are there."""
        if self._creates_graph:
            self._refuse_graph([unit])
        stays = unit.keep_after_backward or (self.in_common and self._order.count(unit) > 1)
        if not unit.open_calls and not stays:  # who follows does not know that it is computed anew
            unit.release()
        if unit.accumulates:
            for local, pack in unit.local_gradients():
                local.widen(pack.dtype)  # they are kept in the dtype in which they travel
            if self.state.accumulating:
                return
        if self._at_end:
            return
        order, due, following = self._reductions, self._due, self._passed + 1
        limit = due[following] if self._is_planned and following < len(due) else len(order)
        while self._next_reduction < limit:
            ready = order[self._next_reduction]
            if ready.waiting and not ready.accumulates:
                return
            self._send(ready)
            self._next_reduction += 1

    def _send(self, unit: Unit | SmallUnits) -> None:
        if unit.accumulates:  # its gradients stay here
            return
        if torch.is_grad_enabled():  # backward(create_graph=True)
            with torch.no_grad():
                self._send(unit)
            return
        while self._in_flight:  # one at a time; see [Note: several forwards] for more than one
            may_wait = self._is_planned or self.needs_one_order or unit in self._in_flight
            if not may_wait and not all(pack.is_done() for pack in self._in_flight[0].sent):
                break
            self._receive()
        unit.send()
        self._in_flight.append(unit)

    def _receive(self) -> None:
        while self._landing and self._landing[0].land():
            self._landing.pop(0)
        unit = self._in_flight.pop(0)
        for pack in unit.sent:
            pack.receive()
        if self._on_host:
            self._landing += [landing for f in unit.flats if (landing := f.store.landing) is not None]
        if self.is_lazy:
            self._last_reduced = [f.param.grad for f in unit.flats if f.param.grad is not None]

    def _land(self) -> None:
        """Gives shards on the host the gradients that they don't have yet, in the order in which they come."""
        self._landing = []
        for landing in [f.store.landing for f in self._on_host]:
            if landing is not None:
                landing.land(at_end=True)

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
        for unit in self.units:
            unit.end_backward()
        self._lock_held()
        if self._is_planned:  # no other graph is there
            find_kept_views(self._flats)
        self.units[0].backwards += not self.is_alone  # of ranks that are, some may have more
        if self._after_backward is not None:
            self._after_backward()

    def _refuse_graph(self, units: Sequence[Unit]) -> None:
        """Raises LifecycleError if gradients of sharded parameters would be in a graph: reductions are in none."""
        for flat in (f for u in units if self.is_lazy or u.waiting < len(u.fired) for f in u.flats):
            if not flat.store.is_whole:
                raise LifecycleError(
                    f"rank {flat.group.rank}: a backward with create_graph=True that gives gradients of an FSDP "
                    "module's parameters (a Hessian of the weights) is not possible: they are reduced over ranks, and "
                    "no graph leads back through that. Gradients of inputs may be in a graph, but on XLA: "
                    "torch.autograd.grad(outputs, inputs, create_graph=True); for others use finite differences"
                )

    @property
    def has_sent(self) -> bool:
        """Says whether this backward has come to the end of its plan."""
        is_through = self._is_planned and self._passed + 1 >= len(self._plan.gathers)
        return is_through and self._next_reduction == len(self._reductions)

    def send_rest(self) -> None:
        """Comes to the end of the plan, whose module backward has left."""
        if self._is_planned and not self._at_end:
            self._finish_plan()
            while any(pack.replicas is not None for unit in self._in_flight for pack in unit.sent):
                self._receive()  # averages over replicas, a collective: it has to come before those of the next root

    def _finish_plan(self) -> None:
        if self._creates_graph:
            self._refuse_graph(self.units)
        gathers = self._plan.gathers
        while self._passed + 1 < len(gathers):  # other ranks may have reached them
            self._pass()
            if not gathers[self._passed].keep_after_backward:
                gathers[self._passed].release()
        for unit in self.units:
            if unit.is_held and not unit.keep_after_backward:
                unit.release()
        self._release_kept()
        rest = self._reductions[self._next_reduction :]
        self._next_reduction += len(rest)
        for row in rest:
            self._send(row)

    def _finish_backward(self) -> None:
        self._finish_plan()
        for unit in self.units:
            if unit.accumulates:
                for local, pack in unit.local_gradients():
                    local.note(pack)
            # kept: another rank may have some. Else it was called outside of the root, or in nested backwards
            elif unit.keeps_local or unit.has_local_gradients():
                self._send(unit)
        while self._in_flight:
            self._receive()
        if self._on_host:
            self._land()
        if self.rounds is not None:
            self.rounds.end()
            if self.rounds.are_waiting():
                refuse_steps.note(self.rounds)

    def recover(self) -> None:
        """Discards the state of a backward that raised."""
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
        for pack in [pack for unit in units for pack in unit.sent]:
            with contextlib.suppress(RuntimeError):  # its memory is in use until it is through, or has failed
                pack.forget()
        for landing in [f.store.landing for f in self._on_host]:
            if landing is not None:
                landing.forget()
        for unit in self.units:
            unit.drop_local_gradients()
            unit.release()
            unit.end_backward()
        self._release_kept()
        for flat in self._held:
            flat.drop()
        self._held = []

    def _release_kept(self) -> None:
        kept, self._kept = self._kept, []
        for flat in kept:
            flat.store.users -= 1
            if flat.store.users <= 0:
                flat.store.release()

    # ------------------------------------------------------------ steps of others
    def attend(self, unit: Unit, inside: Callable[[], None]) -> None:
        """Gathers a unit and gives it back, as ranks do that call it (collective); ``inside`` comes in between."""
        in_common, was_reached = self.in_common, unit.is_reached
        self.in_common = False
        self.before_forward(unit, ())
        if self.recording:
            self._around[-1] = None
        inside()
        self.after_forward(unit)
        self.in_common, unit.is_reached = in_common, was_reached

    def go_on(self, depth: int, trains: bool) -> None:
        """Goes on with a forward that raised inside of so many units."""
        self.forwards, self.recording = depth, trains
        self._around = [None] * len(self._calls)

    def follow_backward(self, local: bool) -> None:
        """Takes part in the backward of the last forward, or in the rest of one that raised here (collective).

        It computes nothing, and adds no gradients.

        Args:
            local: they are kept, as inside of ``no_sync``.
        """
        before = self.set_accumulating([local] * len(self.units))
        self.state.follow(self.begin_backward)
        self.set_accumulating(before)

    # ------------------------------------------------------------ steps without others
    def gather_all(self) -> None:
        """Gathers everything (collective); until :meth:`give_back_all` it stays, and gradients stay local."""
        self.check_idle("uneven(once=True)")
        self.is_alone, self._accumulated = True, self.set_accumulating([True] * len(self.units))
        for unit in self.units:
            self._replan = unit.notice_trainable() or self._replan  # this rank may run no forward
            unit.release()
        self._gather_together(self.units)
        self._held = [flat for unit in self.units for flat in unit.flats]
        for flat in self._held:
            flat.hold()
            if flat.store.state is GATHERING:
                flat.store.finish()
        self._lock_held()

    def give_back_all(self) -> None:
        """Ends that, on this rank; in which order units were called last is not what other ranks did."""
        self.set_accumulating(self._accumulated)
        self.is_alone = False
        self.units[0].backwards += 1
        for unit in self.units:
            unit.release()
        for flat in self._held:
            flat.drop()
        self._held, self._order = [], []

    # ------------------------------------------------------------ between steps
    def check_idle(self, what: str) -> None:
        """Raises LifecycleError in the middle of a forward or backward."""
        if self.in_place:
            self.forget_interrupted()
        if self.forwards or (self.state.task != NO_BACKWARD and current_backward() != NO_BACKWARD):
            raise LifecycleError(
                f"Cannot manually unshard parameters during forward/backward: {what} inside of forward or backward is "
                "not possible; call it between steps"
            )
        self.recover()

    def set_accumulating(self, values: Sequence[bool]) -> list[bool]:
        """Says of each unit whether it keeps its gradients, as in ``no_sync``; returns what was said before."""
        before = [unit.accumulates for unit in self.units]
        for unit, value in zip(self.units, values, strict=True):
            unit.accumulates = value
        self.state.accumulating = all(values)
        return before

    def reduce_now(self, everything: bool = False) -> None:
        """Reduces what backwards have kept (collective), without one; with ``everything`` also where there was none."""
        self.check_idle("a reduction of gradients")
        with torch.no_grad():
            for unit in self.units:
                # not whether this rank has gradients of it: another one may have
                kept = everything or (unit.keeps_local and not unit.accumulates)
                if unit.is_trainable and kept:
                    self._send(unit)
            while self._in_flight:
                self._receive()
            self._land()
            for unit in self.units:
                unit.end_backward()

    def __getstate__(self) -> NoReturn:
        raise TypeError("an engine is not copied; the root makes a new one")
