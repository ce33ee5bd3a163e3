"""Where the replicas of one process meet on the host: object exchange, and the check that they are in step.

A replica that arrives brings the collectives it wants to run. Nobody is let through before every replica
of the groups named there has arrived, and only if all of them brought the same calls. What would be a hang
inside of the device's runtime is so an :class:`OutOfStepError` that names each replica's call.

[Note: turns] One replica at a time runs Python, and each has its own host random state.
torch's CPU generator, ``random`` and numpy's global generator belong to the process. With replicas as threads,
``torch.manual_seed(0); Net()`` would draw from a generator that other replicas advance. So a replica holds
the turn until it has to wait for another one, and the host's random states change hands with it: every
replica draws as if it were a process of its own. Threads of Python hold the interpreter's lock in turn
anyway, so little time is lost; compiled programs run meanwhile on the runtime's own threads.

Not covered: generators that a program shares between replicas itself, and threads it starts.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from shardkit.backend import host_random_states, seed_host, set_host_random_states
from shardkit.errors import OutOfStepError, RankLostError

_SHOWN = 3  # calls of a replica that a message quotes


@dataclass(frozen=True)
class ReplicaCall:
    """One collective, or an agreement, as a replica asked for it.

    ``label`` is shown, and compared: what is gathered for roots of equal shapes, or reduced of layers, is alike but for
    it.
    """

    group: tuple[int, ...]  # global ranks
    what: str
    label: str = field(default="", compare=False)
    # of all ranks, as the program has it
    partition: Sequence[Sequence[int]] = field(default=(), compare=False)

    def __str__(self) -> str:
        return f"{self.what} {self.label!r}" if self.label else self.what

    def in_program(self) -> tuple[object, ...]:
        """Returns what is the same on all ranks of a program, whichever group each is in."""
        return self.what, self.label, [list(group) for group in self.partition]


@dataclass
class _Arrival:
    where: str
    calls: tuple[ReplicaCall, ...]
    payload: bytes
    error: Exception | None = None
    payloads: dict[int, bytes] | None = None

    @property
    def done(self) -> bool:
        return self.error is not None or self.payloads is not None

    def describe(self) -> str:
        shown = ", ".join(str(call) for call in self.calls[-_SHOWN:])
        more = "... " if len(self.calls) > _SHOWN else ""
        return f"{self.where} with {len(self.calls)} collective(s): {more}{shown}"


_Rows = dict[int, list[ReplicaCall]]  # calls by rank


class ReplicaMeeting:
    """Meeting point of ``world_size`` threads, one a replica.

    ``one_program``: a collective of some is one of all, who bring the same in the same order, and all sync or all read,
    as on a TPU. Else groups whose ranks are apart have nothing to do with each other, and a read may meet a sync.
    """

    def __init__(self, world_size: int, *, one_program: bool = False) -> None:
        self._one_program = one_program
        self._changed = threading.Condition()
        self._world_size = world_size
        self._here: dict[int, _Arrival] = {}
        self._gone: dict[int, str] = {}
        self._failed = False

    def arrive(
        self, rank: int, where: str, calls: Sequence[ReplicaCall], payload: bytes = b""
    ) -> dict[int, bytes]:
        """Waits for every replica that the calls' groups connect; returns their payloads by rank."""
        arrival = _Arrival(where, tuple(calls), payload)
        with self._changed:
            self._here[rank] = arrival
            self._settle()
            while not arrival.done:
                self._changed.wait()
        if arrival.error is not None:
            raise arrival.error
        return arrival.payloads or {}

    def leave(self, rank: int, reason: str, *, failed: bool = False) -> None:
        """Notes that this replica will not come again."""
        with self._changed:
            self._gone[rank] = reason
            self._failed = self._failed or failed
            self._settle()

    def _settle(self) -> None:
        """Decides all that can be decided now (the lock is held)."""
        # the fewest first: ranks that meet among themselves don't differ from those that wait for all
        for rank in sorted(self._here, key=lambda r: len(self._connected(r))):
            members = self._connected(rank) if rank in self._here else set()
            if members and members <= self._here.keys():
                self._decide(members)
            elif members & self._gone.keys():
                self._give_up(members & self._here.keys())
        if self._here and len(self._here) + len(self._gone) == self._world_size:
            self._give_up(set(self._here))  # nobody is left who could let them through
        self._changed.notify_all()

    def _connected(self, rank: int) -> set[int]:
        """Returns all that must be here before ``rank`` may go on, as far as it is known yet."""
        if self._one_program:
            return set(range(self._world_size))
        members, todo = {rank}, [rank]
        while todo:
            arrival = self._here.get(todo.pop())
            for call in arrival.calls if arrival else ():
                new = set(call.group) - members
                members |= new
                todo.extend(new)
        return members

    def _decide(self, members: set[int]) -> None:
        arrivals = {rank: self._here.pop(rank) for rank in sorted(members)}
        differs = any(_first_difference(rows) is not None for rows in self._compared(arrivals))
        if differs or self._run_different_programs(arrivals):
            text = self._explain(arrivals, {})
            for arrival in arrivals.values():
                arrival.error = OutOfStepError(text)
            return
        payloads = {rank: arrival.payload for rank, arrival in arrivals.items()}
        for arrival in arrivals.values():
            arrival.payloads = payloads

    def _give_up(self, waiting: set[int]) -> None:
        text = self._explain({rank: self._here[rank] for rank in sorted(waiting)}, self._gone)
        for rank in waiting:
            arrival = self._here.pop(rank)
            arrival.error = RankLostError(text) if self._failed else OutOfStepError(text)

    def _run_different_programs(self, arrivals: dict[int, _Arrival]) -> bool:
        """Says whether, on a TPU, one runs all that was recorded, another what a value depends on, or other values."""
        return self._one_program and len({arrival.where for arrival in arrivals.values()}) > 1

    def _compared(self, arrivals: dict[int, _Arrival]) -> Iterator[_Rows]:
        """Lists calls by rank that have to be the same."""
        if self._one_program:
            yield {rank: [*arrival.calls] for rank, arrival in arrivals.items()}
            return
        # within each group, since ranks of different groups may do different things
        for group in sorted({call.group for arrival in arrivals.values() for call in arrival.calls}):
            yield {r: [c for c in arrivals[r].calls if c.group == group] for r in group if r in arrivals}

    def _explain(self, arrivals: dict[int, _Arrival], gone: dict[int, str]) -> str:
        lines = ["replicas are out of step; every replica must issue the same collectives between two syncs:"]
        lines += [f"  rank {rank}: {arrival.describe()}" for rank, arrival in arrivals.items()]
        lines += [f"  rank {rank}: {reason}" for rank, reason in sorted(gone.items())]
        for rows in self._compared(arrivals):
            first = _first_difference(rows)
            if first is not None:
                lines.append(_described(rows, first))
                break
        else:
            if self._run_different_programs(arrivals):
                lines.append(
                    "A sync runs all that was recorded, a read only what the value depends on: on a TPU these are "
                    "different programs, and ranks would wait for each other for ever."
                )
        lines.append(
            "Reading a value (item(), cpu(), print) syncs as well: read it on all replicas, or call mark_step() first."
        )
        return "\n".join(lines)


def _first_difference(rows: _Rows) -> int | None:
    """Returns the first place at which these ranks' calls are not the same."""
    for i, row in enumerate(itertools.zip_longest(*rows.values())):
        keys = [call and call.in_program() for call in row]
        if any(key != keys[0] for key in keys):
            return i
    return None


def _described(rows: _Rows, index: int) -> str:
    row = {rank: calls[index] if index < len(calls) else None for rank, calls in rows.items()}
    alike = len({call.what if call else "" for call in row.values()}) == 1  # among other ranks, then
    each = "; ".join(
        f"rank {rank}: {call or 'nothing'}"
        + (f" in {[list(p) for p in call.partition]}" if call and alike else "")
        for rank, call in row.items()
    )
    return f"First difference, at collective {index} of ranks {list(rows)}: {each}"


# ------------------------------------------------------------------ turns
SEED = 20_000_003  # ranks start differently, as processes do, but the same in each run


class Turns:
    """Gives the turn to one replica at a time, which starts from ``SEED`` + its rank."""

    def __init__(self) -> None:
        self._turn = threading.Lock()

    def take(self, rank: int) -> None:
        self._turn.acquire()
        seed_host(SEED + rank)

    def give(self) -> None:
        self._turn.release()

    @contextmanager
    def given(self) -> Iterator[None]:
        """Lets others run inside of the block, which waits for something that may depend on them."""
        states = host_random_states()
        self._turn.release()
        try:
            yield
        finally:
            self._turn.acquire()
            set_host_random_states(states)
