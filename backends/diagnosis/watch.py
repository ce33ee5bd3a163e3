"""Finds out why a collective does not come to its end, through the job's key-value store.

Nothing is done while collectives take less than a moment. A rank that waits longer publishes once every slice of
time which call it waits in and what it has issued, and reads what the others published.

[Note: who can't get on] Two findings end the wait. The other rank issued something else as that call of the channel:
this is certain, since what was issued stays issued. Or each of the two waits in a call that the other has not
issued: as what was read may be old by now, it has to be found again for the same call after the other rank has
published anew. A rank that waits in no call of ours is asked where it stands, and its witness answers (witness.py has
the rules); where that says nothing certain it is slow, not stuck, and is waited for.

[Note: ranks that have left] A rank that was launched for one function may return from it while others wait. It stays
connected (what it sent has to arrive), so it publishes what it had issued by then: whoever waits in a call beyond that
waits in vain. The number of the function tells this from what it published after an earlier one. An error that nobody
catches is published, too: the process may live on for a while, in other threads or while it cleans up.
"""

from __future__ import annotations

import logging
import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NoReturn

from shardkit.errors import OutOfStepError, RankLostError
from shardkit.progress import unfinished
from shardkit.types import StateDict

from ..forked import belongs_here
from ..torch_types import Store
from . import job
from .board import Board
from .calls import Call, CallFacts, Report
from .ended_waits import end_vain_wait
from .testimony import Testimony, is_behind
from .thread_position import ThreadPosition, issued_of_torch, position_of
from .witness import Stillness

logger = logging.getLogger("shardkit")
_ATTENTIVE = 6.0  # seconds for which a witness looks after a rank has asked
_PATIENCE = 2.0  # seconds that a wait may take after another rank has failed
_ONE_EVENT = 10.0  # seconds within which ranks raise errors for the same reason
_REMEMBERED = 64  # calls
OUT_OF_STEP_HINT = (
    "Every rank has to run the same steps: check for uneven numbers of batches, steps inside 'if rank == 0', and "
    "exceptions that one rank swallowed."
)


class Watch:
    """What the ranks of one group publish about themselves.

    Attributes:
        issued: number of calls in each channel so far; the group keeps it, and ``recent``, up to date (they are
            written at every collective, where a method call would be too much).
        recent: the last calls, as tuples in the form of :class:`Call`.
        thread: the one that issues calls.
        failed_elsewhere: why another rank that waits no more has failed, for calls whose waits look for nothing.
        break_waits: ends what the host may wait for on the group's device.
    """

    def __init__(
        self, store: Store | None, rank: int, world_size: int, name: str, ranks: Sequence[int] | None = None
    ) -> None:  # fmt: skip
        self._board = Board(store, name)
        self._rank, self._world_size = rank, world_size
        self._ranks = tuple(ranks) if ranks is not None else tuple(range(world_size))  # their global ranks
        self.thread = threading.get_ident()
        self._background = id(sys.exc_info()[1])  # the error in whose handler the whole program runs, if any
        self._asked = 0  # the first question of the present wait; 0 for none
        self._testimonies: dict[int, Testimony] = {}  # the last ones of the others
        self._left: tuple[str, dict[str, int] | None] = "", None  # why, and what was issued then
        self._raised: tuple[str, dict[str, int] | None] = "", None  # the last error noted, and the same
        self._called = 0  # how often others have asked
        self._attentive = -math.inf  # until then, looks are published
        self._stillness = Stillness()
        self._failures: list[tuple[int, StateDict]] = []  # other ranks, and what they published
        self.failed_elsewhere = ""
        self.break_waits: Callable[[], object] | None = None
        self._known: set[str] = set()  # failures that this rank has raised an error for
        self._raised_at = -math.inf
        self.issued: dict[str, int] = {}
        self.recent: deque[CallFacts] = deque(maxlen=_REMEMBERED)
        self._beat = 0
        self._suspects: dict[int, Report] = {}  # ranks that looked stuck, and what they had published then
        self._failed = False
        belongs_here(self)
        job.add(self, witnessed=self._board.is_open and world_size > 1)

    def look(self, call: Call) -> None:
        """Publishes that this rank still waits in ``call``, and looks where the others are.

        Raises:
            OutOfStepError: another rank can't come to this call, or gave up.
            RankLostError: another rank has lost the connection to a third one.
        """
        self.thread = threading.get_ident()
        self._report(call)
        question = self._board.ask()
        self._asked = self._asked or question
        for rank in range(self._world_size):
            if rank == self._rank:
                continue
            entry = self._board.read(f"rank{rank}")
            if entry is not None and "failed" in entry:
                self._raised_at, self._asked = time.monotonic(), 0
                kind = RankLostError if entry["lost"] else OutOfStepError
                raise kind(self._with(call, f"rank {rank} gave up: {entry['failed']}"))
            where = ""
            if entry is not None:
                where = self._elsewhere(call, rank, Report.of(entry))
            else:
                self._suspects.pop(rank, None)
            if entry is None or not entry["waits"]:
                where = where or self._absent(call, rank)
            if where:
                here = f"rank {self._rank} is in {call.describe()}"
                message = f"ranks are out of step: {here}; rank {rank} {where}. {OUT_OF_STEP_HINT}"
                self.fail(message)
                raise OutOfStepError(message)

    def warn(self, call: Call, seconds: float) -> None:
        """Says in the log whom this rank waits for, and where those stand."""
        others = []
        for rank, testimony in sorted(self._testimonies.items()):
            if testimony.issued.get(call.channel, 0) < call.sequence:
                others.append(f"rank {rank} stands at {testimony.where} (for {testimony.still:.0f} s)")
        logger.warning(
            "rank %d has waited %.0f s in %s. %s",
            self._rank,
            seconds,
            call.describe(),
            "; ".join(others[:8]) or "Nothing is known of the others.",
        )

    def hears_of(self, rank: int) -> bool:
        """Whether a rank's witness has answered in this wait, so that its process lives."""
        return rank in self._testimonies

    def _absent(self, call: Call, rank: int) -> str:
        """Why a rank that waits in no call of ours can't come to this one; empty if it may."""
        entry = self._board.read(f"stands{rank}")
        if entry is None:
            return ""
        testimony = Testimony(**entry)
        if testimony.answers < self._asked:
            return ""
        self._testimonies[rank] = testimony
        if testimony.issued in (self._left[1], self._raised[1]):  # both left the same, and this one goes on
            testimony = testimony._replace(left="", raised="")
        if testimony.issued.get(call.channel, 0) >= call.sequence:
            return ""
        return testimony.has_passed(call, self.issued) or testimony.why_it_will_not_come(
            self._ranks[self._rank]
        )

    def _elsewhere(self, call: Call, rank: int, theirs: Report) -> str:
        """Where a rank is that can't come to ``call``; empty if it may. See the notes on top."""
        other = theirs.contradiction(call)
        if other is not None:
            return f"is in {other.describe()}"
        if theirs.has_issued(call):
            self._suspects.pop(rank, None)
            return ""
        if theirs.waits is None:
            return "has returned from its function" if theirs.job == job.number() else ""
        if self.issued.get(theirs.waits.channel, 0) >= theirs.waits.sequence:
            self._suspects.pop(rank, None)
            return ""
        before = self._suspects.setdefault(rank, theirs)
        if before.beat == theirs.beat:
            return ""
        if before.waits != theirs.waits:
            self._suspects[rank] = theirs
            return ""
        return f"is in {theirs.waits.describe()}"

    def leave(self) -> None:
        """Tells ranks that wait (or will) that this one's function has returned."""
        self._failures = []
        if not self._failed:  # what it said then says more
            self._report(None)

    def last_words(self, call: Call) -> str:
        """What a rank said before it gave up by itself (not because it lost another one), as this one's error.

        Empty if none did.
        """
        for rank, entry in self._read_failures():
            if not entry["lost"]:
                return self._with(call, f"rank {rank} gave up: {entry['failed']}")
        return ""

    def _with(self, call: Call, failure: str) -> str:
        """Another rank's failure, and what this rank waits in, unless that says it already."""
        known = f"rank {self._rank} is in {call.describe()}" in failure
        return failure if known else f"rank {self._rank} waits in {call.describe()}, but {failure}"

    def raise_failure(self, call: Call) -> NoReturn:
        """Raises OutOfStepError where another rank has failed, and nobody waits on the host to hear of it."""
        why, self.failed_elsewhere = self.failed_elsewhere, ""
        self._known.update(entry["failed"] for _, entry in self._failures)
        self._failures, self._raised_at = [], time.monotonic()
        raise OutOfStepError(self._with(call, why))

    def arrived(self) -> None:
        """The call that was waited for is through."""
        self._suspects.clear()
        self._testimonies.clear()
        self._asked = 0
        self._board.publish(f"rank{self._rank}", {})

    def fail(self, message: str, *, lost: bool = False) -> None:
        """Tells ranks that wait (or will) that this one won't come; ``lost``: because it lost another one."""
        self._failed = True
        self._raised_at, self._asked = time.monotonic(), 0
        entry = {"failed": message, "lost": lost, "of_torch": issued_of_torch()}
        self._board.publish(f"rank{self._rank}", entry)
        self._board.ask()

    def give_up(self, why: str) -> None:
        """Ranks that wait for this one hear that it left with an error; until it issues something again.

        Costs nothing: they have to ask.
        """
        self._left = why, dict(self.issued)

    def fail_with(self, error: BaseException) -> None:
        """An error ends the function or the program."""
        if not self._failed:  # what it said then says more
            self.fail(f"rank {self._rank} ended with {type(error).__name__}: {error}")

    def note_error(self, error: BaseException) -> None:
        """The same, if this rank stands still for some seconds: an error may be caught as well."""
        self._raised = f"{type(error).__name__}: {error}", dict(self.issued)

    # ------------------------------------------------------------ in the witness' thread
    def attend(self) -> bool:
        """Answers those who have asked, and ends this rank's wait for one that has failed. See witness.py.

        Returns:
            Whether somebody asks.
        """
        called, now = self._board.asked(), time.monotonic()
        if called != self._called:
            if self._attentive < now:
                self._stillness = Stillness()
            self._called, self._attentive = called, now + _ATTENTIVE
            self._failures = self._new_failures()
            if self._failures:
                rank, entry = self._failures[0]
                self.failed_elsewhere = f"rank {rank} gave up: {entry['failed']}"
        asked = self._attentive >= now
        if asked or self._failures:
            position = position_of(self.thread, self._background)
            if position is not None:
                self._testify(position, called, asked)
        return asked

    def _testify(self, position: ThreadPosition, called: int, asked: bool) -> None:
        still = self._stillness.seconds(position)
        if asked:
            issued = dict(self.issued)
            left, raised = (why if then == issued else "" for why, then in (self._left, self._raised))
            testimony = Testimony(
                called, issued, issued_of_torch(), self._ranks[self._rank], still, left, raised,
                unfinished(position.in_backward), position.where, position.operation, position.group, position.peer,
                position.error, position.in_debugger, position.has_ended, list(self.recent),
            )  # fmt: skip
            self._board.publish(f"stands{self._rank}", testimony._asdict())
        if still < _PATIENCE or not (position.operation or self.break_waits):
            return
        counts = issued_of_torch()
        for rank, entry in self._failures:
            if not position.operation or (
                position.peer in (-1, self._ranks[rank])
                and is_behind(entry["of_torch"], counts, position.group)
            ):
                self._failures, self._raised_at, self.failed_elsewhere = [], time.monotonic(), ""
                call = f"in torch.distributed's {position.operation}, called " if position.operation else ""
                where = f"{call}at {position.where}"
                message = f"rank {self._rank} was {where}, but rank {rank} will not come: {entry['failed']}"
                end_vain_wait(self.thread, position, message, self.break_waits)
                return

    def _new_failures(self) -> list[tuple[int, StateDict]]:
        """Without those for which this rank has raised an error too: it may have gone on since."""
        found = self._read_failures()
        if time.monotonic() - self._raised_at < _ONE_EVENT:
            self._known.update(entry["failed"] for _, entry in found)
        return [(rank, entry) for rank, entry in found if entry["failed"] not in self._known]

    # ------------------------------------------------------------ what is published
    def _read_failures(self) -> list[tuple[int, StateDict]]:
        """The other ranks that have failed, and what they published."""
        found = []
        for rank in range(self._world_size):
            entry = self._board.read(f"rank{rank}") if rank != self._rank else None
            if entry is not None and "failed" in entry:
                found.append((rank, entry))
        return found

    @property
    def is_open(self) -> bool:
        """Whether ranks can hear of each other."""
        return self._board.is_open

    def close(self) -> None:
        """The ranks' process group is no more."""
        self._board.close()

    left_behind = close  # in a fork: the store's connection is the parent's

    def _report(self, waits: Call | None) -> None:
        self._beat += 1
        recent = [Call(*c) for c in list(self.recent)]
        report = Report(self._beat, waits, dict(self.issued), recent, job.number())
        self._board.publish(f"rank{self._rank}", report._asdict())
