"""A thread that says where this rank stands when others wait for it, and ends a wait that is in vain.

[Note: the witness] A rank that waits in a collective of torch's, handles an exception, or computes, can't say so
itself. One thread a process looks each second whether anybody has asked (one question to the store), and while
somebody does, publishes where the rank's Python stands and for how long it has not moved. It starts with the first
watch and ends with the last; while nobody waits for longer than two seconds, it reads no stack.

[Note: who is stuck] A rank that computes, loads data, compiles or stands in a debugger is slow, not stuck, and is
waited for. A rank is taken to be lost to a call that it has not issued if for some seconds its stack has not moved and
it
 - waits in a collective of torch's to which the asking rank has not come (that rank can't, as it waits too);
 - handles an exception, or is past one, in the middle of what all ranks do together;
 - has raised an error of shardkit's own, or in a method that all ranks call together, and has issued nothing since.
It is lost at once if its program is over, or if an error took it out of what others are in (:meth:`Group.abort`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from shardkit.errors import OutOfStepError
from shardkit.progress import unfinished

from .aside import NoAnswer
from .standing import Standing, end_wait, issued_of_torch, others_in_collectives, standing_of, take_back

logger = logging.getLogger("shardkit")
_PERIOD = 1.0  # seconds between looks, and
_PERIOD_WHEN_ASKED = 0.5
_STILL = 2.5  # seconds after which a thread that waits has not only just begun
_STILL_IN_ERROR = 4.0  # handling an exception may take a moment
_LAST_WORDS = 5.0  # seconds that a broken wait gets to raise


class Testimony(NamedTuple):
    """What a rank's witness says of it.

    Attributes:
        answers: the latest question that it had heard; what answers an earlier one is old.
        issued: how many calls in each channel.
        of_torch: how many collectives in each of torch's process groups.
        rank: global.
        still: seconds for which the thread has not moved.
        left: why it will not come, in its own words.
        raised: the last error of what all ranks do together, if it has issued nothing since.
        unfinished: what it has begun.
    """

    answers: int
    issued: dict[str, int]
    of_torch: dict[str, int]
    rank: int
    still: float
    left: str
    raised: str
    unfinished: str
    where: str
    operation: str
    group: str
    peer: int
    error: str
    in_debugger: bool
    has_ended: bool

    def why_it_will_not_come(self, here: int) -> str:
        """A verb and its object, about a rank that has not issued the call which global rank ``here`` waits in.

        Empty if it may still come. See [Note: who is stuck].
        """
        if self.has_ended:
            return "has come to the end of its program"
        if self.left:
            return f"gave up: {self.left}. It stands at {self.where}"
        if self.in_debugger:
            return ""
        if self.operation and self.still >= _STILL and self._waits_for(here) and not others_in_collectives():
            return f"is in torch.distributed's {self.operation}, called at {self.where}"
        if self.raised and self.still >= _STILL_IN_ERROR:
            return f"raised {self.raised}, and stands at {self.where}"
        if self.unfinished and self.still >= _STILL_IN_ERROR:
            if self.error:
                return f"handles {self.error} at {self.where}, in the middle of {self.unfinished}"
            if "raised" in self.unfinished:
                return f"left {self.unfinished}, and stands at {self.where}"
        return ""

    def _waits_for(self, here: int) -> bool:
        """Whether this rank's collective of torch's is one that global rank ``here`` has not come to."""
        if self.peer >= 0:
            return self.peer == here
        return is_behind(issued_of_torch(), self.of_torch, self.group)


def is_behind(mine: dict[str, int], theirs: dict[str, int], group: str) -> bool:
    """Whether one rank has issued less than another in a process group of torch's ("": in any)."""
    groups = [group] if group else list(theirs)
    return any(g in mine and mine[g] < theirs.get(g, 0) for g in groups)


class Attended(Protocol):
    """A group's watch, as the witness sees it."""

    thread: int

    def attend(self) -> bool: ...


class Stillness:
    """For how long a thread has not moved, as far as it was looked at."""

    def __init__(self) -> None:
        self._mark: tuple[Any, ...] | None = None
        self._since = 0.0

    def seconds(self, standing: Standing) -> float:
        """To be called with each new look."""
        now = time.monotonic()
        if standing.mark != self._mark:
            self._mark, self._since = standing.mark, now
        return now - self._since


class Witness:
    """The thread. See [Note: the witness]."""

    def __init__(self, watches: Callable[[], list[Any]]) -> None:
        self._watches = watches
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._process = 0
        self._stop = threading.Event()

    def begin(self) -> None:
        """There is a new watch."""
        with self._lock:
            if self._thread is None or self._process != os.getpid():
                self._process, self._stop = os.getpid(), threading.Event()
                self._thread = threading.Thread(target=self._run, name="shardkit-witness", daemon=True)
                self._thread.start()

    def end(self) -> None:
        """Before the interpreter ends: a thread that comes back from the store then would abort the process."""
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
                watches = self._watches()
                if not watches:
                    self._thread = None
                    return
            asked = False
            for watch in watches:
                with contextlib.suppress(RuntimeError, ValueError, NoAnswer):
                    asked = watch.attend() or asked
            del watches, watch  # they would live until the next look


def testify(
    standing: Standing, still: float, issued: dict[str, int], left: str, raised: str, rank: int, answers: int
) -> Testimony:
    """What there is to say about this rank."""
    return Testimony(
        answers, issued, issued_of_torch(), rank, still, left, raised, unfinished(standing.in_backward), standing.where,
        standing.operation, standing.group, standing.peer, standing.error, standing.in_debugger, standing.has_ended,
    )  # fmt: skip


def end_vain_wait(thread: int, standing: Standing, message: str) -> None:
    """Ends this rank's wait in a collective of torch's that another one will not come to.

    The thread raises OutOfStepError. If it can't be reached, the process ends, as NCCL's watchdog would do it.
    """
    logger.error("%s", message)
    end_wait(thread, standing.group, OutOfStepError, message)
    until = time.monotonic() + _LAST_WORDS
    while time.monotonic() < until:
        time.sleep(_PERIOD / 4)
        now = standing_of(thread)
        if now is None or now.mark != standing.mark:
            time.sleep(_PERIOD)
            take_back(thread)
            return
    print(f"{message}\nIts wait can't be ended, so this process ends.", file=sys.stderr, flush=True)
    os._exit(1)
