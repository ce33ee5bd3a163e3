"""Ranks as threads of this process, of which only one runs at a time.

[Note: the baton] A rank runs until it has to wait for another one. Then the lowest rank that can go on does. So the
order in which things happen is the same in every run, nothing needs a lock, and when no rank can go on, or one
that others wait for has finished, it is known at once.
"""

from __future__ import annotations

import copy
import sys
import threading
import traceback
from collections.abc import Callable, Sequence

import torch

from shardkit.errors import (
    BackendError,
    ConfigurationError,
    OutOfStepError,
    RankFailedError,
    RankLostError,
    ShardkitError,
)
from shardkit.types import Args, T, Tree

from ..diagnosis.calls import Call
from ..diagnosis.watch import OUT_OF_STEP_HINT
from ..forked import belongs_here, refusal
from ..random_states import HostRandomStates, host_random_states, set_host_random_states

Finish = Callable[[list[Tree]], object]  # what is done with all that ranks brought
_LAST_WORDS = 2.0  # seconds that ranks get to unwind after a timeout


class Meeting:
    """One collective, from the first rank that arrives to the last.

    Args:
        ranks: global rank of each member, in group order.

    Attributes:
        done: all have arrived, and the result is there.
        error: why it can't be done any more: an exception's class and message.
        given_up: how often each rank that has arrived had given up before.
        result: what ``finish`` returned on the last rank to arrive.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = tuple(ranks)
        self.result: object = None
        self.error: tuple[type[ShardkitError], str] | None = None
        self.done = False
        self.given_up: dict[int, int] = {}
        self._calls: dict[int, Call] = {}  # by global rank
        self._terms: dict[int, object] = {}
        self._brought: dict[int, Tree] = {}

    @property
    def over(self) -> bool:
        """It came to its end, good or bad."""
        return self.done or self.error is not None

    def missing(self) -> set[int]:
        return set(self.ranks) - self._calls.keys()

    def arrive(self, rank: int, call: Call, terms: object, brought: Tree, finish: Finish) -> None:
        """``rank`` is here; the last one does the work for all.

        Args:
            terms: what has to be equal on all ranks.
            brought: handed to ``finish`` as a list in group order.
        """
        self._calls[rank], self._terms[rank] = call, terms
        if self.error is not None:
            return
        other = next((r for r, t in self._terms.items() if t != terms), None)
        if other is not None:
            theirs = f"rank {other} is in {self._calls[other].describe()} {self._terms[other]}"
            self.fail(f"{theirs}, rank {rank} in {call.describe()} {terms}")
            return
        self._brought[rank] = brought
        if self.missing():
            return
        try:
            with torch.no_grad():
                self.result = finish([self._brought[r] for r in self.ranks])
        except OutOfStepError as error:
            self.fail(str(error))
        except Exception as error:  # noqa: BLE001 - it is every member's
            self.error = BackendError, f"{call.describe()} failed: {type(error).__name__}: {error}"
        self.done = self.error is None
        self._brought.clear()

    def fail(self, what: str) -> None:
        self.error = OutOfStepError, f"ranks are out of step: {what}. {OUT_OF_STEP_HINT}"
        self._brought.clear()


class RankThreads:
    """``world_size`` ranks; see [Note: the baton].

    Args:
        world_size: number of ranks.
        enter: called in each rank's thread before its function.
    """

    def __init__(self, world_size: int, enter: Callable[[int], None] = lambda rank: None) -> None:
        if world_size < 1:
            raise ConfigurationError(f"world_size must be at least 1, got {world_size}")
        self.world_size = world_size
        self._enter = enter
        self._gates = [threading.Semaphore(0) for _ in range(world_size)]
        self._threads: list[threading.Thread] = []
        self._running = 0
        self._waits: dict[int, tuple[Meeting, Call]] = {}
        self._open: dict[int, Meeting] = {}  # by id: those that not all members have reached
        self._finished: set[int] = set()
        self._failure: tuple[int, BaseException, str] | None = None
        self._given_up = [0] * world_size  # how often
        self._ended = ""  # why ranks have to stop
        self._all_done = threading.Event()
        self._is_left_behind = False
        belongs_here(self)

    # ------------------------------------------------------------ from the thread that starts them
    def run(self, fn: Callable[..., T], args: Args, timeout: float | None) -> list[T]:
        """``fn(rank, *args)`` on every rank, each with a copy of ``args``; the results in rank order.

        Raises:
            RankFailedError: a rank raised, or the time is over. A rank that computes for ever stays a thread in the
                background then: threads can't be ended from outside.
        """
        results: dict[int, T] = {}
        before = host_random_states()
        self._threads = [
            threading.Thread(
                target=self._main,
                args=(rank, fn, copy.deepcopy(args), before, results),
                name=f"rank {rank}",
                daemon=True,
            )
            for rank in range(self.world_size)
        ]
        for thread in self._threads:
            thread.start()
        try:
            self._pass_on()
            if not self._all_done.wait(timeout):
                raise self._timed_out(timeout)
            for thread in self._threads:
                thread.join()
        except BaseException:
            self._end("the job was ended")
            for thread in self._threads:
                thread.join(_LAST_WORDS / self.world_size)
            raise
        finally:
            set_host_random_states(before)
        if self._failure is not None:
            rank, error, text = self._failure
            raise RankFailedError(rank, type(error).__name__, text) from error
        return [results[rank] for rank in range(self.world_size)]

    def _main(
        self,
        rank: int,
        fn: Callable[..., T],
        args: Args,
        random_states: HostRandomStates,
        results: dict[int, T],
    ) -> None:
        self._gates[rank].acquire()
        try:
            if self._ended:
                return
            set_host_random_states(random_states)
            self._enter(rank)
            results[rank] = fn(rank, *args)
        except BaseException as error:  # noqa: BLE001 - reported by run
            if self._failure is None:
                self._failure = rank, error, traceback.format_exc()
                self._ended = self._ended or f"rank {rank} failed with {type(error).__name__}: {error}"
        finally:
            self._finish(rank)

    def _finish(self, rank: int) -> None:
        self._finished.add(rank)
        self._fail_without(rank, "has finished")
        if len(self._finished) == self.world_size:
            self._all_done.set()
        else:
            self._pass_on()

    def _end(self, why: str) -> None:
        """Every rank stops when it communicates next."""
        self._ended = self._ended or why
        for gate in self._gates:
            gate.release()

    def _timed_out(self, timeout: float | None) -> RankFailedError:
        frames = sys._current_frames()
        text = f"no answer after {timeout} s; rank {self._running} was running"
        for rank, thread in enumerate(self._threads):
            stack = frames.get(thread.ident or 0)
            if rank not in self._finished and stack is not None:
                text += f"\n--- rank {rank}\n{''.join(traceback.format_stack(stack))}"
        return RankFailedError(self._running, "TimeoutError", text)

    # ------------------------------------------------------------ from a rank
    def arrive(
        self, rank: int, meeting: Meeting, call: Call, terms: object, brought: Tree, finish: Finish
    ) -> None:  # fmt: skip
        """``rank`` issues its part of a collective.

        Raises:
            RankLostError: another rank failed.
            ConfigurationError: this is not the rank's thread.
        """
        if self._threads and threading.current_thread() is not self._threads[rank]:
            raise ConfigurationError(
                f"rank {rank}: {call.describe()} was called from {threading.current_thread().name!r}; only the thread "
                "that runs a simulated rank can communicate"
            )
        self._check_alive(rank, call)
        meeting.given_up[rank] = self._given_up[rank]
        meeting.arrive(rank, call, terms, brought, finish)
        missing = meeting.missing()
        if not missing:
            self._open.pop(id(meeting), None)
            return
        self._open[id(meeting)] = meeting
        gone = sorted(missing & self._finished)
        if gone and meeting.error is None:
            meeting.fail(f"rank {rank} is in {call.describe()}, but rank {gone[0]} has finished")

    def wait(self, rank: int, meeting: Meeting, call: Call) -> None:
        """Returns when all have arrived.

        Raises:
            OutOfStepError: they are in different calls, or can't come any more.
            RankLostError: another rank failed.
        """
        if not meeting.over:
            self._check_alive(rank, call)
            self._waits[rank] = meeting, call
            states = host_random_states()
            self._pass_on()
            self._gates[rank].acquire()
            set_host_random_states(states)
            self._waits.pop(rank, None)
        if meeting.done:
            return
        self._check_alive(rank, call)
        if meeting.error is not None:
            kind, text = meeting.error
            raise kind(text)

    def give_up(self, rank: int, why: str) -> None:
        """Nobody waits for ``rank`` in what is in flight, but for ranks that gave up as often and have gone on."""
        self._given_up[rank] += 1
        times = self._given_up[rank]
        self._fail_without(rank, f"gave up: {why}", lambda m: any(n < times for n in m.given_up.values()))

    def _fail_without(self, rank: int, why: str, which: Callable[[Meeting], bool] = lambda _: True) -> None:
        for meeting in self._open.values():
            if rank in meeting.missing() and meeting.error is None and which(meeting):
                waiting, call = next(iter(meeting._calls.items()))
                meeting.fail(f"rank {waiting} is in {call.describe()}, but rank {rank} {why}")

    def left_behind(self) -> None:
        """See forked.py; a single rank needs no other thread."""
        self._is_left_behind = self.world_size > 1

    def _check_alive(self, rank: int, call: Call) -> None:
        if self._is_left_behind:
            raise refusal(rank)
        if self._ended:
            raise RankLostError(f"rank {rank} can't go on with {call.describe()}: {self._ended}")

    def _pass_on(self) -> None:
        """Lets the lowest rank run that can (the caller waits for its own gate next, or ends)."""
        left = [r for r in range(self.world_size) if r not in self._finished]
        ready = [r for r in left if self._ended or r not in self._waits or self._waits[r][0].over]
        if not ready:
            where = "; ".join(f"rank {r} is in {self._waits[r][1].describe()}" for r in left)
            for meeting, _ in list(self._waits.values()):
                meeting.fail(where)
            ready = left
        self._running = ready[0]
        self._gates[self._running].release()
