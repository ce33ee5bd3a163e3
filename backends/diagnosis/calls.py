"""A collective as its caller sees it, and what a rank publishes of those that it has issued."""

from __future__ import annotations

from typing import NamedTuple

from shardkit.types import StateDict

AGREEMENT = "(agreement on the next call)"  # ends the names of channels in which nothing is sent
_FREE_SIZES = ("all_to_all",)  # ranks may send different numbers of elements


CallFacts = tuple[str, int, str, int, str]  # a call as it is noted: what a Call has


class Call(NamedTuple):
    """A collective as its caller sees it."""

    channel: str
    sequence: int  # counts calls in the channel
    operation: str
    numel: int
    label: str

    def describe(self) -> str:
        what = f" ({self.label})" if self.label else ""
        size = f" of {self.numel} elements" if self.numel else ""
        return f"{self.operation}{size}{what}, call {self.sequence} of channel {self.channel!r}"

    def meets(self, other: Call) -> bool:
        """Whether two ranks' calls of the same number in the same channel can work together."""
        if self.channel.endswith(AGREEMENT):
            return self[2:] == other[2:]
        same_size = self.numel == other.numel or self.operation in _FREE_SIZES
        return self.operation == other.operation and same_size


class WaitReport(NamedTuple):
    """Published by a rank that waits, or has left."""

    beat: int  # counts its reports
    waits: Call | None  # None: it has left
    issued: dict[str, int]  # how many calls in each channel
    recent: list[Call]  # the last ones of all channels
    job: int  # counts the functions it was launched for

    @classmethod
    def of(cls, entry: StateDict) -> WaitReport:
        waits = Call(*entry["waits"]) if entry["waits"] else None
        recent = [Call(*call) for call in entry["recent"]]
        return cls(entry["beat"], waits, entry["issued"], recent, entry["job"])

    def has_issued(self, call: Call) -> bool:
        return self.issued.get(call.channel, 0) >= call.sequence

    def contradiction(self, call: Call) -> Call | None:
        """Returns what this rank issued in the place of another rank's ``call``, if they can't meet."""
        place = call[:2]
        return next((c for c in self.recent if c[:2] == place and not c.meets(call)), None)
