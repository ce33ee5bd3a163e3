"""Finds out why a collective does not come to its end, through the job's key-value store.

Nothing is done while collectives take less than a moment. A rank that waits longer publishes once every slice of
time which call it waits in and what it has issued, and reads what the others published.

[Note: who can't get on] Two findings end the wait. The other rank issued something else as that call of the channel:
this is certain, since what was issued stays issued. Or each of the two waits in a call that the other has not
issued: as what was read may be old by now, it has to be found again for the same call after the other rank has
published anew. A rank that publishes nothing is slow, not stuck, and is waited for.
"""

from __future__ import annotations

import json
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
    """What a waiting rank publishes."""

    beat: int  # counts its reports
    waits: Call
    issued: dict[str, int]  # how many calls in each channel
    recent: list[Call]  # the last ones of all channels

    @classmethod
    def of(cls, entry: dict[str, Any]) -> Report:
        recent = [Call(*call) for call in entry["recent"]]
        return cls(entry["beat"], Call(*entry["waits"]), entry["issued"], recent)

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

    def look(self, call: Call) -> None:
        """Publishes that this rank still waits in ``call``, and looks where the others are.

        Raises:
            OutOfStepError: another rank can't come to this call, or gave up.
            RankLostError: another rank has lost the connection to a third one.
        """
        self._beat += 1
        mine = Report(self._beat, call, self.issued, [Call(*c) for c in self.recent])
        self._publish(mine._asdict())
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
                self._compare(mine, rank, Report.of(entry))

    def _compare(self, mine: Report, rank: int, theirs: Report) -> None:
        """Raises OutOfStepError if the two can't get on; see [Note: who can't get on]."""
        other = theirs.contradiction(mine.waits)
        if other is None:
            if theirs.has_issued(mine.waits) or mine.has_issued(theirs.waits):
                self._suspects.pop(rank, None)
                return
            before = self._suspects.setdefault(rank, theirs)
            if before.beat == theirs.beat:
                return
            if before.waits != theirs.waits:
                self._suspects[rank] = theirs
                return
            other = theirs.waits
        message = (
            f"ranks are out of step: rank {self._rank} is in {mine.waits.describe()}; rank {rank} is in "
            f"{other.describe()}. {_HINT}"
        )
        self.fail(message)
        raise OutOfStepError(message)

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
        self._publish({"failed": message, "lost": lost})

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
