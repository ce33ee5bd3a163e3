"""Finds out why a collective does not come to its end, through the job's key-value store.

Nothing is done while collectives take less than a moment. A rank that waits longer publishes once every slice of
time which call it waits in and what it has issued, and reads what the others published.

[Note: who can't get on] Two findings end the wait. The other rank issued something else as that call of the channel:
this is certain, since what was issued stays issued. Or each of the two waits in a call that the other has not
issued: as what was read may be old by now, it has to be found again for the same call after the other rank has
published anew. A rank that waits in no call of ours is asked where it stands, and its watchdog answers ([Note: who
is stuck] in stack_report.py); where that says nothing certain it is slow, not stuck, and is waited for.

[Note: ranks that have left] A rank that was launched for one function may return from it while others wait. It stays
connected (what it sent has to arrive), so it publishes what it had issued by then: whoever waits in a call beyond that
waits in vain. The number of the function tells this from what it published after an earlier one. An error that nobody
catches is published, too: the process may live on for a while, in other threads or while it cleans up.

[Note: the watchdog] A rank that waits in a collective of torch's, handles an exception, or computes, can't say so
itself. One thread a process looks each second whether anybody has asked (one question to the store), and while
somebody does, publishes where the rank's Python stands and for how long it has not moved. It starts with the first
watch and ends with the last; while nobody waits for longer than a second, it reads no stack. A wait in vain, in a
collective of torch's or for the device, it ends.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import datetime
import functools
import json
import logging
import math
import os
import queue
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from operator import attrgetter
from types import TracebackType
from typing import Any, NoReturn, TypeAlias

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed.distributed_c10d import PrefixStore  # type: ignore[attr-defined]

from shardkit.errors import OutOfStepError, RankLostError
from shardkit.progress import listen_to_errors, threads, unfinished
from shardkit.types import StateDict, T

from ..connections import belongs_here
from .stack_report import (
    Call,
    CallFacts,
    StackReport,
    ThreadPosition,
    WaitReport,
    is_behind,
    issued_of_torch,
    position_of,
)

# ------------------------------------------------------------ calls of the job's store
# They may never return: a TCP store waits for an answer without a limit.
# If its server's machine can't be reached, or its process is stopped, the caller would hang there, whatever timeout its
# process group has. So the calls are made by a thread that nobody has to wait for.
_AT_EXIT = 2.0  # seconds


class NoAnswer(Exception):
    """The store has not answered in time; it may do so later."""


_Request: TypeAlias = "tuple[Future[Any], Callable[[], object]]"  # a call, and where its result comes


class StoreThread:
    """Makes calls for others; starts when it is first needed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process = 0
        self._thread: threading.Thread | None = None
        self._asked: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        self._overdue: Future[Any] | None = None

    def ask(self, call: Callable[[], T], seconds: float, *, patient: bool = False) -> T:
        """``call()``, or its error.

        Args:
            patient: wait, though an earlier call is overdue.
        """
        overdue, answer = self._overdue, Future[T]()
        if not patient and overdue is not None and not overdue.done() and self._process == os.getpid():
            raise NoAnswer
        self._begin()
        self._asked.put((answer, call))
        if not wait([answer], seconds).done:
            self._overdue = answer
            raise NoAnswer
        return answer.result()

    def end(self) -> None:
        """Ends it before the interpreter ends: a thread that comes back from the store then would abort the process."""
        with self._lock:
            thread, self._thread = self._thread, None
            self._asked.put(None)
        if thread is not None and self._process == os.getpid():
            thread.join(_AT_EXIT)

    def _begin(self) -> None:
        with self._lock:
            if self._thread is None or self._process != os.getpid():
                self._process, self._asked, self._overdue = os.getpid(), queue.SimpleQueue(), None
                self._thread = threading.Thread(
                    target=self._run, args=(self._asked,), name="shardkit-store", daemon=True
                )
                self._thread.start()

    @staticmethod
    def _run(calls: queue.SimpleQueue[_Request | None]) -> None:
        while (asked := calls.get()) is not None:
            answer, call = asked
            try:
                answer.set_result(call())
            except BaseException as error:  # noqa: BLE001 - the asker's
                answer.set_exception(error)
            del asked, answer, call  # they hold a store


STORE_THREAD = StoreThread()


_ANSWERS = 5.0  # seconds in which the store answers
_QUESTIONS = "called"


class Board:
    """Entries by key.

    Once the store's server is gone it is empty and takes nothing: the collective itself fails next.
    """

    def __init__(self, store: Store, name: str) -> None:
        self._store: Store | None = PrefixStore(f"shardkit/{name}", store)

    is_open = property(lambda self: self._store is not None)

    def close(self) -> None:
        """Lets the store go, and with it the port of its server."""
        self._store = None

    def _told(self, call: Callable[[Store], T], otherwise: T) -> T:
        """Calls the store; where it does not answer in time, or is gone, ``otherwise``."""
        store = self._store
        if store is None:
            return otherwise
        try:
            return STORE_THREAD.ask(lambda: call(store), _ANSWERS)
        except NoAnswer:
            return otherwise
        except (RuntimeError, ValueError):
            self._store = None
            return otherwise

    def publish(self, key: str, entry: StateDict) -> None:
        self._told(lambda store: store.set(key, json.dumps(entry)), None)

    def read(self, key: str) -> StateDict | None:
        """Returns what is there; None where nothing is known."""
        return (
            self._told(lambda store: json.loads(store.get(key)) if store.check([key]) else None, None) or None
        )

    def ask(self) -> int:
        """Asks the watchdogs of all ranks to say where these stand, for some seconds; returns the question's number."""
        return self._told(lambda store: int(store.add(_QUESTIONS, 1)), 0)

    def asked(self, before: int) -> int:
        """Returns how many questions there were; ``before`` where the store does not say."""
        return self._told(
            lambda store: int(store.add(_QUESTIONS, 0)) if store.check([_QUESTIONS]) else 0, before
        )


# ------------------------------------------------------------ who can't get on
logger = logging.getLogger("shardkit")
_ATTENTIVE = 6.0  # seconds for which a watchdog looks after a rank has asked
_PATIENCE = 2.0  # seconds that a wait may take after another rank has failed
_ONE_EVENT = 10.0  # seconds within which ranks raise errors for the same reason
_REMEMBERED = 64  # calls
_PERIOD = 1.0  # seconds between looks of the thread, and
_PERIOD_WHEN_ASKED = 0.5
_LAST_WORDS = 5.0  # seconds that a broken wait gets to raise
_RETURNED = "has returned from its function"
_LOOK = 0.25  # seconds between looks at it, and
_MOMENT = 1.0  # after the thread has moved
_NOTHING = datetime.timedelta(milliseconds=1)
OUT_OF_STEP_HINT = (
    "Every rank has to run the same steps: check for uneven numbers of batches, steps inside 'if rank == 0', and "
    "exceptions that one rank swallowed."
)


class Watch:
    """Publishes where this rank of a group stands, and reads where the others do.

    Attributes:
        issued: number of calls in each channel so far; the group keeps it, and ``recent``, up to date (they are
            written at every collective, where a method call would be too much).
        recent: the last calls, as tuples in the form of :class:`Call`.
        thread: the one that issues calls.
        failed_elsewhere: why another rank that waits no more has failed, for calls whose waits look for nothing.
        break_waits: ends what the host may wait for on the group's device.
    """

    def __init__(
        self, store: Store, rank: int, world_size: int, name: str, ranks: Sequence[int] | None = None
    ) -> None:
        self._board = Board(store, name)
        self._rank, self._world_size = rank, world_size
        self._ranks = tuple(ranks) if ranks is not None else tuple(range(world_size))  # their global ranks
        self.thread = threading.get_ident()
        self._background = id(sys.exc_info()[1])  # the error in whose handler the whole program runs, if any
        self._asked = 0  # the first question of the present wait, and not an old one; 0 for none
        self.reports: dict[int, StackReport] = {}  # the last ones of the others
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
        self._suspects: dict[int, WaitReport] = {}  # ranks that looked stuck: what they had published then
        self._failed = False
        belongs_here(self)
        _watchdog.watches.add(self)
        if world_size > 1:
            _watchdog.begin()
            _publish_uncaught_errors()

    def look(self, call: Call) -> None:
        """Publishes that this rank still waits in ``call``, and looks where the others are."""
        self.thread = threading.get_ident()
        self._report(call)
        question = self._board.ask()
        self._asked = max(self._asked or question, question - 2 * self._world_size)  # all ask: two rounds
        for rank in range(self._world_size):
            if rank == self._rank:
                continue
            entry = self._board.read(f"rank{rank}")
            if entry is not None and "failed" in entry:
                self._raised_at, self._asked = time.monotonic(), 0
                kind = RankLostError if entry["lost"] else OutOfStepError
                raise kind(self._with(call, f"rank {rank} gave up: {entry['failed']}"))
            if entry is None:
                self._suspects.pop(rank, None)
            where = "" if entry is None else self._elsewhere(call, rank, WaitReport.of(entry))
            if entry is None or not entry["waits"]:
                where = where or self._absent(call, rank)
            if where:
                here = f"rank {self._rank} is in {call.describe()}"
                message = f"ranks are out of step: {here}; rank {rank} {where}. {OUT_OF_STEP_HINT}"
                if where == _RETURNED:  # maybe as it has heard of another's error, which then says more
                    message = self.last_words(call) or message
                self.fail(message)
                raise OutOfStepError(message)

    def warn(self, call: Call, seconds: float) -> None:
        """Says in the log whom this rank waits for, and where those stand."""
        others = []
        for rank, report in sorted(self.reports.items()):
            if report.issued.get(call.channel, 0) < call.sequence:
                others.append(f"rank {rank} stands at {report.at.where} (for {report.still:.0f} s)")
        logger.warning(
            "rank %d has waited %.0f s in %s. %s",
            self._rank,
            seconds,
            call.describe(),
            "; ".join(others[:8]) or "Nothing is known of the others.",
        )

    def _absent(self, call: Call, rank: int) -> str:
        """Says why a rank that waits in no call of ours can't come to this one; empty if it may."""
        entry = self._board.read(f"stands{rank}")
        if entry is None:
            return ""
        report = StackReport.of(entry)
        if report.answers < self._asked:
            self.reports.pop(rank, None)  # if it answers no more, it may be gone
            return ""
        self.reports[rank] = report
        if report.issued in (self._left[1], self._raised[1]):  # both left the same, and this one goes on
            report = report._replace(left="", raised="")
        if report.issued.get(call.channel, 0) >= call.sequence:
            return ""
        return report.has_passed(call, self.issued) or report.why_it_will_not_come(self._ranks[self._rank])

    def _elsewhere(self, call: Call, rank: int, theirs: WaitReport) -> str:
        """Says where a rank is that can't come to ``call``; empty if it may. See the notes on top."""
        other = next((c for c in theirs.recent if c[:2] == call[:2] and not c.meets(call)), None)
        if other is not None:  # in the place of this call, which it can't meet
            return f"is in {other.describe()}"
        if theirs.issued.get(call.channel, 0) >= call.sequence:
            self._suspects.pop(rank, None)
            return ""
        if theirs.waits is None:
            return _RETURNED if theirs.job == _watchdog.job else ""
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
        """Returns what a rank said before it gave up by itself (not because it lost another one), as this one's error.

        Empty if none did.
        """
        for rank, entry in self._read_failures():
            if not entry["lost"]:
                return self._with(call, f"rank {rank} gave up: {entry['failed']}")
        return ""

    def _with(self, call: Call, failure: str) -> str:
        """Says another rank's failure, and what this rank waits in, unless that says it already."""
        known = f"rank {self._rank} is in {call.describe()}" in failure
        return failure if known else f"rank {self._rank} waits in {call.describe()}, but {failure}"

    def raise_failure(self, call: Call) -> NoReturn:
        """Raises OutOfStepError where another rank has failed, and nobody waits on the host to hear of it."""
        why, self.failed_elsewhere = self.failed_elsewhere, ""
        self._known.update(entry["failed"] for _, entry in self._failures)
        self._failures, self._raised_at = [], time.monotonic()
        raise OutOfStepError(self._with(call, why))

    def arrived(self) -> None:
        """Notes that the call that was waited for is through."""
        self._suspects.clear()
        self.reports.clear()
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
        """Lets ranks that wait for this one hear that it left with an error; until it issues something again.

        Costs nothing: they have to ask.
        """
        self._left = why, dict(self.issued)

    def note_error(self, error: BaseException) -> None:
        """Publishes an error if this rank then stands still for some seconds: it may be caught as well."""
        self._raised = f"{type(error).__name__}: {error}", dict(self.issued)

    # ------------------------------------------------------------ in the watchdog's thread
    def attend(self) -> bool:
        """Answers those who have asked, and ends this rank's wait for one that has failed.

        Returns:
            Whether somebody asks.
        """
        called, now = self._board.asked(self._called), time.monotonic()
        if called != self._called:
            if self._attentive < now:
                self._stillness = Stillness()
            self._called, self._attentive = called, now + _ATTENTIVE
            found = self._read_failures()
            if now - self._raised_at < _ONE_EVENT:  # it has raised an error too, and may have gone on since
                self._known.update(entry["failed"] for _, entry in found)
            self._failures = [(rank, entry) for rank, entry in found if entry["failed"] not in self._known]
            if self._failures:
                rank, entry = self._failures[0]
                self.failed_elsewhere = f"rank {rank} gave up: {entry['failed']}"
        asked = self._attentive >= now
        if asked or self._failures:
            position = position_of(self.thread, self._background)
            if position is not None:
                self._publish_stack(position, called, asked)
        return asked

    def _publish_stack(self, position: ThreadPosition, called: int, asked: bool) -> None:
        still = self._stillness.seconds(position.mark)
        if asked:
            issued = dict(self.issued)
            left, raised = (why if then == issued else "" for why, then in (self._left, self._raised))
            report = StackReport(
                called,
                issued,
                issued_of_torch(),
                self._ranks[self._rank],
                still,
                left,
                raised,
                unfinished(position.in_backward),
                position,
                list(self.recent),
            )
            self._board.publish(f"stands{self._rank}", report._asdict())
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

    # ------------------------------------------------------------ what is published
    def _read_failures(self) -> list[tuple[int, StateDict]]:
        """Returns the other ranks that have failed, and what they published."""
        found = []
        for rank in range(self._world_size):
            entry = self._board.read(f"rank{rank}") if rank != self._rank else None
            if entry is not None and "failed" in entry:
                found.append((rank, entry))
        return found

    is_open = property(attrgetter("_board.is_open"))  # ranks can hear of each other

    def close(self) -> None:
        """Notes that the ranks' process group is no more."""
        self._board.close()

    left_behind = close  # in a fork: the store's connection is the parent's

    def _report(self, waits: Call | None) -> None:
        self._beat += 1
        recent = [Call(*c) for c in list(self.recent)]
        report = WaitReport(self._beat, waits, dict(self.issued), recent, _watchdog.job)
        self._board.publish(f"rank{self._rank}", report._asdict())


class Stillness:
    """Measures for how long a thread has not moved, as far as it was looked at."""

    def __init__(self) -> None:
        self._mark: object = None
        self._since = 0.0

    def seconds(self, mark: object) -> float:
        """Takes a new look, by a mark that is another one once the thread has moved; returns the seconds."""
        now = time.monotonic()
        if mark != self._mark:
            self._mark, self._since = mark, now
        return now - self._since


class Watchdog:
    """Serves the watches of a process in a thread. See [Note: the watchdog].

    Attributes:
        watches: of all groups; each lasts as long as somebody else refers to it.
        job: counts the functions that this process has run as a rank.
    """

    def __init__(self) -> None:
        self.watches: weakref.WeakSet[Watch] = weakref.WeakSet()
        self.job = 0
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._process = 0
        self._stop = threading.Event()

    def begin(self) -> None:
        """Starts the thread, if it does not run."""
        with self._lock:
            if self._thread is None or self._process != os.getpid():
                self._process, self._stop = os.getpid(), threading.Event()
                self._thread = threading.Thread(target=self._run, name="shardkit-watchdog", daemon=True)
                self._thread.start()

    def end(self) -> None:
        """Ends it before the interpreter ends: a thread that comes back from the store then would abort the process."""
        with self._lock:
            thread, self._thread = self._thread, None
            self._stop.set()
        if thread is not None and self._process == os.getpid() and thread is not threading.current_thread():
            thread.join(2 * _PERIOD)

    def _run(self) -> None:
        stop, asked = self._stop, False
        while not stop.wait(_PERIOD_WHEN_ASKED if asked else _PERIOD):
            with self._lock:
                if stop.is_set():
                    return
                watches = [w for w in list(self.watches) if w.is_open]
                if not watches:
                    self._thread = None
                    return
            asked = False
            for watch in watches:
                with contextlib.suppress(RuntimeError, ValueError, NoAnswer):
                    asked = watch.attend() or asked
            del watches, watch  # they would live until the next look


def end_vain_wait(
    thread: int, position: ThreadPosition, message: str, break_waits: Callable[[], object] | None = None
) -> None:
    """Ends this rank's wait in a collective of torch's, or for its device, that another one will not come to.

    The thread raises OutOfStepError. If it can't be reached, the process ends, as NCCL's watchdog would do it.

    The exception is delivered when the thread runs Python again, which torch.distributed's functions do before they
    pass an error on. A caller that waits for a work itself gets torch's own error: ours would come to it in the middle
    of whatever it does about that. So that the wait ends, the group's connections are broken: with gloo by a receive
    that is given no time, which closes them, with NCCL by its own abort.
    """
    logger.error("%s", message)
    of_torch = bool(position.operation) or break_waits is None
    if position.group or not of_torch:
        told = {"__init__": lambda self: OutOfStepError.__init__(self, message)}
        error = type("OutOfStepError", (OutOfStepError,), told)
        error.__module__, error.__qualname__ = OutOfStepError.__module__, OutOfStepError.__qualname__
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(error))
    if not of_torch and break_waits is not None:
        break_waits()
    for pg in list(dist.distributed_c10d._world.pg_map) if of_torch else ():
        other = next((r for r in range(pg.size()) if r != pg.rank()), None)
        for device in pg._device_types if position.group in ("", str(pg.group_name)) else ():
            backend = pg._get_backend(device)
            with contextlib.suppress(RuntimeError):
                if backend.name() != "gloo":
                    backend.abort()
                elif other is not None:
                    backend.recv([torch.empty(1, device="cpu")], other, 0x5AFE).wait(_NOTHING)  # type: ignore[attr-defined]
    until = time.monotonic() + _LAST_WORDS
    while time.monotonic() < until:
        time.sleep(_LOOK)
        now = position_of(thread)
        if now is None or now.mark != position.mark:
            time.sleep(_MOMENT)
            # it has raised another error already: this one would come at a moment that nobody expects
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), None)
            return
    print(f"{message}\nIts wait can't be ended, so this process ends.", file=sys.stderr, flush=True)
    os._exit(1)


_watchdog = Watchdog()


def begin_job() -> None:
    """Notes that this process starts to run a function as a rank."""
    _watchdog.job += 1


def end_job() -> None:
    """Notes that the function has returned: its ranks that still wait for this one hear of it."""
    for watch in list(_watchdog.watches):
        watch.leave()


def fail_job(error: BaseException) -> None:
    """Notes that an error ends the function or the program: ranks that wait for this one hear of it."""
    for watch in list(_watchdog.watches):
        if not watch._failed:  # what it said then says more
            watch.fail(f"rank {watch._rank} ended with {type(error).__name__}: {error}")


def _note(error: BaseException) -> None:
    for watch in list(_watchdog.watches):
        if watch.thread == threading.get_ident():
            watch.note_error(error)


listen_to_errors(_note)


@functools.cache
def _publish_uncaught_errors() -> None:
    previous, previous_of_threads = sys.excepthook, threading.excepthook

    def publish(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        previous(kind, error, trace)
        if not isinstance(error, KeyboardInterrupt):
            fail_job(error)

    def publish_of_thread(args: threading.ExceptHookArgs) -> None:
        previous_of_threads(args)
        if args.exc_value is not None and threading.get_ident() in threads():
            fail_job(args.exc_value)

    sys.excepthook, threading.excepthook = publish, publish_of_thread


@atexit.register
def _end_watchdog() -> None:
    _watchdog.end()
    end_job()
    STORE_THREAD.end()
