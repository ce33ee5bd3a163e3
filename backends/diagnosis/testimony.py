"""What a rank's witness says of it, and whether the rank may still come to a call.

[Note: who is stuck] A rank that computes, loads data, compiles or stands in a debugger is slow, not stuck, and is
waited for. A rank is taken to be lost to a call that it has not issued if for some seconds its stack has not moved and
it
 - waits in a collective of torch's to which the asking rank has not come (that rank can't, as it waits too);
 - handles an exception, or is past one, in the middle of what all ranks do together;
 - has raised an error of shardkit's own, or in a method that all ranks call together, and has issued nothing since.
It is lost at once if its program is over, or if an error took it out of what others are in (:meth:`Group.abort`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .calls import AGREEMENT, Call, CallFacts
from .thread_position import issued_of_torch, others_in_collectives

_STILL = 2.5  # seconds after which a thread that waits has not only just begun
_STILL_IN_ERROR = 4.0  # handling an exception may take a moment


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
        recent: the last calls of all channels.
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
    recent: Sequence[CallFacts] = ()

    def has_passed(self, call: Call, issued: dict[str, int]) -> str:
        """What this rank has issued in the place before which another one, that has ``issued`` so many, wants to agree.

        That one's ``call`` is the agreement. A verb and its object; empty if it may still come.
        """
        channel = call.channel.removesuffix(f" {AGREEMENT}")
        following = issued.get(channel, 0) + 1
        if channel == call.channel or self.issued.get(channel, 0) < following:
            return ""
        calls = [Call(*c).describe() for c in self.recent if tuple(c[:2]) == (channel, following)]
        return f"has gone on to {calls[0] if calls else f'call {following} of channel {channel!r}'}"

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
