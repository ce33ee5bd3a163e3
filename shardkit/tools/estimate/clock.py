"""How long a step takes on a device that is not there: the recorded step, run by a clock.

[Note: the clock] A device has two streams. What is computed runs in order on one of them. Collectives run on the other
one in the order in which they were issued, one at a time, since they share the links; each begins when what was
computed before it was issued is through. A wait holds computation up until a collective is through; that time is
exposed. The host is taken to be ahead of the device, and all ranks to be alike.

[Note: FSDP2's schedule] torch's FSDP2 (``torch/distributed/fsdp/_fully_shard``) makes the same units' steps by other
rules. In forward a unit's gather is issued when the unit is called, on a stream of its own, which waits for the copy
out of the gather before the last one and not for computation. In backward a unit asks for the next one when it has its
own. Each gather is copied out. The unit that was called last is gathered again. Each parameter is padded to a multiple
of the ranks in its first dimension. What its Python costs is not counted, as ours is not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from .devices import Device
from .tape import Event, Issue, Kernel, Mark, Wait


@dataclass(frozen=True)
class Times:
    """Of a step.

    Attributes:
        step: seconds.
        exposed: seconds of that in which a collective is waited for and nothing is computed.
        communicating: seconds that collectives take, exposed or not.
        in_flight: most bytes of collectives that have been issued and not waited for.
    """

    step: float
    exposed: float
    communicating: float
    in_flight: float


def clocked(events: Iterable[Event], device: Device, ranks: int) -> Times:
    """The last step of a tape; see [Note: the clock]."""
    now = free = exposed = busy = 0.0
    ends: dict[int, float] = {}  # of collectives, by number
    waited = {-1: 0.0}  # when computation went on after them
    flying: dict[int, float] = {}
    marks = [(0.0, 0.0, 0.0)]  # of the ends of steps: when, exposed so far, busy so far
    most = 0.0
    for event in events:
        if isinstance(event, Kernel):
            now += device.computing(event)
        elif isinstance(event, Issue):
            ready = now if event.after is None else waited[event.after]
            time = device.communicating(event.operation, event.nbytes, ranks)
            ends[event.number] = free = max(free, ready) + time
            busy += time
            flying[event.number] = event.nbytes
            most = max(most, sum(flying.values()))
        elif isinstance(event, Wait):
            exposed += max(0.0, ends[event.number] - now)
            waited[event.number] = now = max(now, ends[event.number])
            del flying[event.number]
        elif event.name == "step":
            marks.append((now, exposed, busy))
    step, waits, communicating = (b - a for a, b in zip(marks[-2], marks[-1], strict=True))
    return Times(step, waits, communicating, most)


def as_fsdp2(events: Sequence[Event], padding: Mapping[str, float]) -> list[Event]:
    """Returns what FSDP2 would do in the steps of a tape of ``fsdp``; see [Note: FSDP2's schedule].

    Args:
        padding: by label, how much larger a unit is with FSDP2's padding.
    """
    events = [_padded(e, padding) if isinstance(e, Issue) else e for e in events]
    gathers = {e.number: e for e in events if isinstance(e, Issue) and e.operation == "all_gather"}
    number = -2  # of what is gathered again
    found: list[Event] = []
    waited: list[int] = []  # gathers of this step
    asked: list[Issue] = []
    again: Issue | None = None
    forward = True

    def issue(event: Issue, after: int | None) -> None:
        found.append(event._replace(after=after))

    def arrive(event: Issue) -> None:
        found.extend([Wait(event.number), Kernel(0, 2, 2 * event.nbytes)])
        waited.append(event.number)

    for event in events:
        if isinstance(event, Mark):
            forward = event.name == "step"
            found.append(event)
            if not forward and len(waited) > 1:
                again = gathers[waited[-1]]._replace(number=number)
                number -= 1
                issue(again, waited[-1])
            elif forward:
                waited = []
        elif isinstance(event, Issue):
            if again is not None:  # its backward begins here, or is over if there is none to gather after it
                arrive(again)
            if event.operation != "all_gather":
                issue(event, None)
            elif again is not None:
                issue(event, again.number)
            elif not forward:
                asked.append(event)
            again = None
        elif isinstance(event, Wait) and event.number in gathers:
            gather = gathers[event.number]
            if forward:
                issue(gather, None if not waited else waited[-2] if len(waited) > 1 else -1)
            arrive(gather)
            for a in asked:
                issue(a, gather.number)
            asked = []
        else:
            found.append(event)
    return found


def _padded(event: Issue, padding: Mapping[str, float]) -> Issue:
    larger = padding.get(event.label.removeprefix("gradients of "), 1.0)
    return event._replace(nbytes=event.nbytes * larger)
