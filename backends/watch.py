"""Finds out why a collective does not come to its end, through the job's key-value store.

Nothing is done while collectives take less than a moment. A rank that waits longer publishes which call it
waits in and what it has issued so far, once every slice of time, and reads what the others published. Two
ranks can't get on when each waits in a call that the other has not issued; they say so and stop.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from torch.distributed.distributed_c10d import PrefixStore  # type: ignore[attr-defined]

from shardkit.errors import OutOfStepError


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


class Watch:
    """What the ranks of one group publish about themselves."""

    def __init__(self, store: Any, rank: int, world_size: int, name: str) -> None:
        self._store = PrefixStore(f"shardkit/{name}", store) if store is not None else None
        self._rank, self._world_size = rank, world_size
        self.issued: dict[str, int] = {}
        self._beat = 0
        self._suspects: dict[int, int] = {}  # rank -> its beat when it looked stuck

    def look(self, call: Call) -> None:
        """Publishes that this rank still waits in ``call`` and compares.

        Raises:
            OutOfStepError: another rank waits in a call that can't meet this one, or gave up.
        """
        self._beat += 1
        self._publish({"waits": list(call), "issued": self.issued, "beat": self._beat})
        for rank in range(self._world_size):
            entry = self._read(rank) if rank != self._rank else None
            if entry is None:
                self._suspects.pop(rank, None)
            elif "failed" in entry:
                raise OutOfStepError(
                    f"rank {self._rank} waits in {call.describe()}, but rank {rank} gave up: {entry['failed']}"
                )
            else:
                self._compare(call, rank, entry)

    def _compare(self, call: Call, rank: int, entry: dict[str, Any]) -> None:
        theirs = Call(*entry["waits"])
        same = (theirs.channel, theirs.sequence) == (call.channel, call.sequence)
        if same:
            stuck = theirs[2:] != call[2:] and "sizes may differ" not in call.label
            if call.operation != theirs.operation:
                stuck = True
            elif call.label == theirs.label:
                stuck = False  # ranks may pass different numels to the same call
        else:
            they_miss_mine = entry["issued"].get(call.channel, 0) < call.sequence
            i_miss_theirs = self.issued.get(theirs.channel, 0) < theirs.sequence
            stuck = they_miss_mine and i_miss_theirs
        if not stuck:
            self._suspects.pop(rank, None)
            return
        # once more after a moment: what was read may have been an old entry
        if rank not in self._suspects or self._suspects[rank] == entry["beat"]:
            self._suspects.setdefault(rank, entry["beat"])
            return
        message = (
            f"ranks are out of step: rank {self._rank} is in {call.describe()}; rank {rank} is in {theirs.describe()}. "
            "Every rank has to run the same steps: check for uneven numbers of batches, steps inside "
            "'if rank == 0', and exceptions that one rank swallowed."
        )
        self.fail(message)
        raise OutOfStepError(message)

    def arrived(self) -> None:
        """The call that was waited for is through."""
        self._suspects.clear()
        self._publish({})

    def fail(self, message: str) -> None:
        """Tells ranks that wait (or will) that this one won't come."""
        self._publish({"failed": message})

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
