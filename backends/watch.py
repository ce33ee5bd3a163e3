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

import atexit
import contextlib
import functools
import json
import logging
import math
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch.distributed.distributed_c10d import PrefixStore  # type: ignore[attr-defined]

from shardkit.errors import OutOfStepError, RankLostError
from shardkit.progress import listen_to_errors, threads

from .aside import ASIDE, NoAnswer
from .forked import belongs_here
from .standing import Standing, issued_of_torch, standing_of
from .witness import Stillness, Testimony, Witness, end_vain_wait, is_behind, testify

logger = logging.getLogger("shardkit")
AGREEMENT = "(agreement on the next call)"  # ends the names of channels in which nothing is sent
_ATTENTIVE = 6.0  # seconds for which a witness looks after a rank has asked
_PATIENCE = 2.0  # seconds that a wait may take after another rank has failed
_ONE_EVENT = 10.0  # seconds within which ranks raise errors for the same reason
_REMEMBERED = 64  # calls
_ANSWERS = 5.0  # seconds in which the store answers
_FREE_SIZES = ("all_to_all",)  # ranks may send different numbers of elements
_HINT = (
    "Every rank has to run the same steps: check for uneven numbers of batches, steps inside 'if rank == 0', and "
    "exceptions that one rank swallowed."
)


class Call(NamedTuple):
    """A collective as its caller sees it."""

    channel: str
    sequence: int  # counts calls in the channel
    operation: str
    numel: int
    label: str

    def describe(self) -> str:
        what = f" ({self.label})" if self.label else ""
        return f"{self.operation} of {self.numel} elements{what}, call {self.sequence} of channel {self.channel!r}"

    def meets(self, other: Call) -> bool:
        """Whether two ranks' calls of the same number in the same channel can work together."""
        if self.channel.endswith(AGREEMENT):
            return self[2:] == other[2:]
        same_size = self.numel == other.numel or self.operation in _FREE_SIZES
        return self.operation == other.operation and same_size


class Report(NamedTuple):
    """What a rank publishes that waits, or has left."""

    beat: int  # counts its reports
    waits: Call | None  # None: it has left
    issued: dict[str, int]  # how many calls in each channel
    recent: list[Call]  # the last ones of all channels
    job: int  # counts the functions it was launched for

    @classmethod
    def of(cls, entry: dict[str, Any]) -> Report:
        waits = Call(*entry["waits"]) if entry["waits"] else None
        recent = [Call(*call) for call in entry["recent"]]
        return cls(entry["beat"], waits, entry["issued"], recent, entry["job"])

    def has_issued(self, call: Call) -> bool:
        return self.issued.get(call.channel, 0) >= call.sequence

    def contradiction(self, call: Call) -> Call | None:
        """What this rank issued in the place of another rank's ``call``, if they can't meet."""
        place = call[:2]
        return next((c for c in self.recent if c[:2] == place and not c.meets(call)), None)


class Watch:
    """What the ranks of one group publish about themselves.

    Attributes:
        issued: number of calls in each channel so far; the group keeps it, and ``recent``, up to date (they are
            written at every collective, where a method call would be too much).
        recent: the last calls, as tuples in the form of :class:`Call`.
        thread: the one that issues calls.
    """

    def __init__(
        self, store: Any, rank: int, world_size: int, name: str, ranks: Sequence[int] | None = None
    ) -> None:
        self._store = PrefixStore(f"shardkit/{name}", store) if store is not None else None
        self._rank, self._world_size = rank, world_size
        self._ranks = tuple(ranks) if ranks is not None else tuple(range(world_size))  # their global ranks
        self.thread = threading.get_ident()
        self._background = id(
            sys.exc_info()[1]
        )  # of the error in whose handler the whole program runs, if it does
        self._asked = 0  # the first question of the present wait; 0 for none
        self._testimonies: dict[int, Testimony] = {}  # the last ones of the others
        self._left: tuple[str, dict[str, int] | None] = "", None  # why, and what was issued then
        self._raised: tuple[str, dict[str, int] | None] = "", None  # the last error noted, and the same
        self._called = 0  # how often others have asked
        self._attentive = -math.inf  # until then, looks are published
        self._stillness = Stillness()
        self._failures: list[tuple[int, dict[str, Any]]] = []  # other ranks, and what they published
        self._known: set[str] = set()  # failures that this rank has raised an error for
        self._raised_at = -math.inf
        self.issued: dict[str, int] = {}
        self.recent: deque[tuple[Any, ...]] = deque(maxlen=_REMEMBERED)
        self._beat = 0
        self._suspects: dict[int, Report] = {}  # ranks that looked stuck, and what they had published then
        self._failed = False
        _watches.add(self)
        belongs_here(self)
        if self._store is not None and world_size > 1:
            _begin_witness()

    def look(self, call: Call) -> None:
        """Publishes that this rank still waits in ``call``, and looks where the others are.

        Raises:
            OutOfStepError: another rank can't come to this call, or gave up.
            RankLostError: another rank has lost the connection to a third one.
        """
        self.thread = threading.get_ident()
        self._report(call)
        question = self._call_witnesses()
        self._asked = self._asked or question
        for rank in range(self._world_size):
            if rank == self._rank:
                continue
            entry = self._read(f"rank{rank}")
            if entry is not None and "failed" in entry:
                self._raised_at, self._asked = time.monotonic(), 0
                kind = RankLostError if entry["lost"] else OutOfStepError
                raise kind(
                    f"rank {self._rank} waits in {call.describe()}, but rank {rank} gave up: {entry['failed']}"
                )
            where = ""
            if entry is not None:
                where = self._elsewhere(call, rank, Report.of(entry))
            else:
                self._suspects.pop(rank, None)
            if entry is None or not entry["waits"]:
                where = where or self._absent(call, rank)
            if where:
                here = f"rank {self._rank} is in {call.describe()}"
                message = f"ranks are out of step: {here}; rank {rank} {where}. {_HINT}"
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
        entry = self._read(f"stands{rank}")
        if entry is None:
            return ""
        testimony = Testimony(**entry)
        if testimony.answers < self._asked:
            return ""
        self._testimonies[rank] = testimony
        if testimony.issued in (
            self._left[1],
            self._raised[1],
        ):  # both have left the same, and this one goes on
            testimony = testimony._replace(left="", raised="")
        if testimony.issued.get(call.channel, 0) >= call.sequence:
            return ""
        return testimony.why_it_will_not_come(self._ranks[self._rank])

    def _elsewhere(self, call: Call, rank: int, theirs: Report) -> str:
        """Where a rank is that can't come to ``call``; empty if it may. See the notes on top."""
        other = theirs.contradiction(call)
        if other is not None:
            return f"is in {other.describe()}"
        if theirs.has_issued(call):
            self._suspects.pop(rank, None)
            return ""
        if theirs.waits is None:
            return "has returned from its function" if theirs.job == _job else ""
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
        if not self._failed:  # what it said then says more
            self._report(None)

    def last_words(self) -> str:
        """What a rank said before it gave up by itself (not because it lost another one); empty if none did."""
        for rank, entry in self._read_failures():
            if not entry["lost"]:
                return f"rank {rank} gave up: {entry['failed']}"
        return ""

    def arrived(self) -> None:
        """The call that was waited for is through."""
        self._suspects.clear()
        self._testimonies.clear()
        self._asked = 0
        self._publish(f"rank{self._rank}", {})

    def fail(self, message: str, *, lost: bool = False) -> None:
        """Tells ranks that wait (or will) that this one won't come; ``lost``: because it lost another one."""
        self._failed = True
        self._raised_at, self._asked = time.monotonic(), 0
        entry = {"failed": message, "lost": lost, "of_torch": issued_of_torch()}
        self._publish(f"rank{self._rank}", entry)
        self._call_witnesses()

    def give_up(self, why: str) -> None:
        """Ranks that wait for this one hear that it left with an error; until it issues something again.

        Costs nothing: they have to ask.
        """
        self._left = why, dict(self.issued)

    def note_error(self, error: BaseException) -> None:
        """The same, if this rank stands still for some seconds: an error may be caught as well."""
        self._raised = f"{type(error).__name__}: {error}", dict(self.issued)

    # ------------------------------------------------------------ in the witness' thread
    def attend(self) -> bool:
        """Answers those who have asked, and ends this rank's wait for one that has failed. See witness.py.

        Returns:
            Whether somebody asks.
        """
        called, now = self._count("called"), time.monotonic()
        if called != self._called:
            if self._attentive < now:
                self._stillness = Stillness()
            self._called, self._attentive = called, now + _ATTENTIVE
            self._failures = self._new_failures()
        asked = self._attentive >= now
        if asked or self._failures:
            standing = standing_of(self.thread, self._background)
            if standing is not None:
                self._testify(standing, called, asked)
        return asked

    def _testify(self, standing: Standing, called: int, asked: bool) -> None:
        still = self._stillness.seconds(standing)
        if asked:
            issued = dict(self.issued)
            left, raised = (why if then == issued else "" for why, then in (self._left, self._raised))
            testimony = testify(standing, still, issued, left, raised, self._ranks[self._rank], called)
            self._publish(f"stands{self._rank}", testimony._asdict())
        if not standing.operation or still < _PATIENCE:
            return
        counts = issued_of_torch()
        for rank, entry in self._failures:
            if standing.peer in (-1, self._ranks[rank]) and is_behind(
                entry["of_torch"], counts, standing.group
            ):
                self._failures, self._raised_at = [], time.monotonic()
                where = f"in torch.distributed's {standing.operation}, called at {standing.where}"
                message = f"rank {self._rank} was {where}, but rank {rank} will not come: {entry['failed']}"
                end_vain_wait(self.thread, standing, message)
                return

    def _new_failures(self) -> list[tuple[int, dict[str, Any]]]:
        """Without those for which this rank has raised an error too: it may have gone on since."""
        found = self._read_failures()
        if time.monotonic() - self._raised_at < _ONE_EVENT:
            self._known.update(entry["failed"] for _, entry in found)
        return [(rank, entry) for rank, entry in found if entry["failed"] not in self._known]

    # ------------------------------------------------------------ the store
    def _read_failures(self) -> list[tuple[int, dict[str, Any]]]:
        """The other ranks that have failed, and what they published."""
        found = []
        for rank in range(self._world_size):
            entry = self._read(f"rank{rank}") if rank != self._rank else None
            if entry is not None and "failed" in entry:
                found.append((rank, entry))
        return found

    def close(self) -> None:
        """The ranks' process group is no more: its store is let go, and with it the port of its server."""
        self._store = None

    left_behind = close  # in a fork: the store's connection is the parent's

    def _report(self, waits: Call | None) -> None:
        self._beat += 1
        recent = [Call(*c) for c in list(self.recent)]
        report = Report(self._beat, waits, dict(self.issued), recent, _job)
        self._publish(f"rank{self._rank}", report._asdict())

    def _publish(self, key: str, entry: dict[str, Any]) -> None:
        if self._store is None:
            return
        try:
            with contextlib.suppress(NoAnswer):
                ASIDE.ask(functools.partial(self._store.set, key, json.dumps(entry)), _ANSWERS)
        except (RuntimeError, ValueError):
            self._store = None  # its server is gone; the collective itself will fail next

    def _call_witnesses(self) -> int:
        """All ranks' witnesses say where their ranks stand, for some seconds; the number of this question."""
        if self._store is None:
            return 0
        try:
            return int(ASIDE.ask(functools.partial(self._store.add, "called", 1), _ANSWERS))
        except NoAnswer:
            return 0
        except (RuntimeError, ValueError):
            self._store = None
            return 0

    def _count(self, key: str) -> int:
        store = self._store
        if store is None:
            return 0
        return ASIDE.ask(lambda: int(store.add(key, 0)) if store.check([key]) else 0, _ANSWERS)

    def _read(self, key: str) -> dict[str, Any] | None:
        store = self._store
        if store is None:
            return None
        try:
            text = ASIDE.ask(lambda: store.get(key) if store.check([key]) else "{}", _ANSWERS)
            return json.loads(text) or None
        except NoAnswer:
            return None
        except (RuntimeError, ValueError):
            self._store = None
            return None


_watches: weakref.WeakSet[Watch] = weakref.WeakSet()
_job = 0
_witness = Witness(lambda: [w for w in list(_watches) if w._store is not None])
_hooked = False


def begin_job() -> None:
    """This process starts to run a function as a rank."""
    global _job
    _job += 1


def end_job() -> None:
    """The function has returned: its ranks that still wait for this one hear of it."""
    for watch in list(_watches):
        watch.leave()


def fail_job(error: BaseException) -> None:
    """An error ends the function or the program: ranks that wait for this one hear of it."""
    for watch in list(_watches):
        if not watch._failed:
            watch.fail(f"rank {watch._rank} ended with {type(error).__name__}: {error}")


def _note(error: BaseException) -> None:
    for watch in list(_watches):
        if watch.thread == threading.get_ident():
            watch.note_error(error)


listen_to_errors(_note)


def _begin_witness() -> None:
    global _hooked
    _witness.begin()
    if not _hooked:
        _hooked = True
        previous = sys.excepthook

        def publish(kind: Any, error: BaseException, trace: Any) -> None:
            previous(kind, error, trace)
            if not isinstance(error, KeyboardInterrupt):
                fail_job(error)

        sys.excepthook = publish
        previous_of_threads = threading.excepthook

        def publish_of_thread(args: Any) -> None:
            previous_of_threads(args)
            if args.exc_value is not None and threading.get_ident() in threads():
                fail_job(args.exc_value)

        threading.excepthook = publish_of_thread


@atexit.register
def _end_witness() -> None:
    _witness.end()
    end_job()
    ASIDE.end()
