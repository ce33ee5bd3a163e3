"""One order of units for all ranks, whatever each of them calls: inside of ``uneven``.

[Note: common order] There not all ranks call the same units: one is through with its micro-batches, one drops a layer
or has no token for an expert, the forward of one raises. So all of them keep to one order. A rank that calls a unit
further on first gathers those in between, and gives them back; so it does with the rest of a unit that it leaves, and a
rank without a micro-batch with all units. Backward follows the plan of the whole order in any case ([Note: order] in
``engine.py``): what a rank has not called is gathered and reduced there in its turn, with nothing in it.

The order is learned as the first forward runs, one of training ones and one of evaluations. At each step ranks tell
each other which unit they are about to enter. The first of them, as the model lists units, is entered by all, until
nobody asks for another one: then all leave the unit that they are in. A unit that nobody has called yet has the place
where the model lists it. What is called in another order later is an error, after which the order is learned anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from ..backend import Group
from ..checks import facts_of_all
from ..errors import LifecycleError

if TYPE_CHECKING:
    from .engine import Engine
    from .unit import Unit


class _Call:
    """A call of a unit, with those inside of it.

    Args:
        unit: which is called.
        checkpoint: the number of the one around it, in which it is computed anew; -1 for none.
    """

    def __init__(self, unit: Unit, checkpoint: int = -1) -> None:
        self.unit, self.checkpoint = unit, checkpoint
        self.inside: list[_Call] = []

    def __iter__(self) -> Iterator[_Call]:
        yield self
        for call in self.inside:
            yield from call


class CommonOrder:
    """Keeps a rank's forwards to the order that all ranks share; see the note on top.

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
