"""Finds out why a collective does not come to its end, through the job's key-value store.

Nothing is done while collectives take less than a moment. A rank that waits longer publishes once every slice of
time which call it waits in and what it has issued, and reads what the others published.

[Note: who can't get on] Two findings end the wait. The other rank issued something else as that call of the channel:
this is certain, since what was issued stays issued. Or each of the two waits in a call that the other has not
issued: as what was read may be old by now, it has to be found again for the same call after the other rank has
published anew. A rank that publishes nothing is slow, not stuck, and is waited for.

[Note: ranks that have left] A rank that was launched for one function may return from it while others wait. It stays
connected (what it sent has to arrive), so it publishes what it had issued by then: whoever waits in a call beyond that
waits in vain. The number of the function tells this from what it published after an earlier one.
"""

from __future__ import annotations

import json
import weakref
from collections import deque
from typing import Any, NamedTuple

from torch.distributed.distributed_c10d import PrefixStore  # type: ignore[attr-defined]

from shardkit.errors import OutOfStepError, RankLostError

_REMEMBERED = 64  # calls
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
    """

    def __init__(self, store: Any, rank: int, world_size: int, name: str) -> None:
        self._store = PrefixStore(f"shardkit/{name}", store) if store is not None else None
        self._rank, self._world_size = rank, world_size
        self.issued: dict[str, int] = {}
        self.recent: deque[tuple[Any, ...]] = deque(maxlen=_REMEMBERED)
        self._beat = 0
        self._suspects: dict[int, Report] = {}  # ranks that looked stuck, and what they had published then
        self._failed = False
        _watches.add(self)

    def look(self, call: Call) -> None:
        """Publishes that this rank still waits in ``call``, and looks where the others are.

        Raises:
            OutOfStepError: another rank can't come to this call, or gave up.
            RankLostError: another rank has lost the connection to a third one.
        """
        self._report(call)
        for rank in range(self._world_size):
            entry = self._read(rank) if rank != self._rank else None
            if entry is None:
                self._suspects.pop(rank, None)
            elif "failed" in entry:
                kind = RankLostError if entry["lost"] else OutOfStepError
                raise kind(
                    f"rank {self._rank} waits in {call.describe()}, but rank {rank} gave up: {entry['failed']}"
                )
            else:
                where = self._elsewhere(call, rank, Report.of(entry))
                if where:
                    here = f"rank {self._rank} is in {call.describe()}"
                    message = f"ranks are out of step: {here}; rank {rank} {where}. {_HINT}"
                    self.fail(message)
                    raise OutOfStepError(message)

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
        for rank in range(self._world_size):
            entry = self._read(rank) if rank != self._rank else None
            if entry is not None and "failed" in entry and not entry["lost"]:
                return f"rank {rank} gave up: {entry['failed']}"
        return ""

    def arrived(self) -> None:
        """The call that was waited for is through."""
        self._suspects.clear()
        self._publish({})

    def fail(self, message: str, *, lost: bool = False) -> None:
        """Tells ranks that wait (or will) that this one won't come; ``lost``: because it lost another one."""
        self._failed = True
        self._publish({"failed": message, "lost": lost})

    def _report(self, waits: Call | None) -> None:
        self._beat += 1
        recent = [Call(*c) for c in self.recent]
        self._publish(Report(self._beat, waits, self.issued, recent, _job)._asdict())

    def _publish(self, entry: dict[str, Any]) -> None:
        if self._store is None:
            return
        try:
            self._store.set(f"rank{self._rank}", json.dumps(entry))
        except (RuntimeError, ValueError):
            self._store = None  # its server is gone; the collective itself will fail next

    def _read(self, rank: int) -> dict[str, Any] | None:
        if self._store is None:
            return None
        try:
            key = f"rank{rank}"
            if not self._store.check([key]):
                return None
            return json.loads(self._store.get(key)) or None
        except (RuntimeError, ValueError):
            self._store = None
            return None


_watches: weakref.WeakSet[Watch] = weakref.WeakSet()
_job = 0


def begin_job() -> None:
    """This process starts to run a function as a rank."""
    global _job
    _job += 1


def end_job() -> None:
    """The function has returned: its ranks that still wait for this one hear of it."""
    for watch in list(_watches):
        watch.leave()
