"""How far the clocks of ranks are apart, from messages alone.

A message can't arrive before it was sent. Every rank says its time to all others, several times; what it reads on its
own clock when the others' times are there is an upper bound of the difference, in both directions. The quickest message
each way gives the narrowest bounds, and the middle between them errs by at most half their distance.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from ..backend import Group
from .ranges import now

ROUNDS = 8


class Reading(NamedTuple):
    """One comparison of clocks.

    Attributes:
        at: when, on this rank's clock, in ns.
        ahead: of rank 0's clock, in ns.
        error: at most, in ns.
    """

    at: int
    ahead: float
    error: float


def compare_clocks(group: Group, rounds: int = ROUNDS) -> Reading:
    """Of this rank and rank 0 (collective)."""
    if group.world_size == 1:
        return Reading(now(), 0.0, 0.0)
    control = group.channel("control")
    bounds = [2**62] * group.world_size  # this rank's clock minus the other's is at most that
    for _ in range(rounds):
        sent = now()
        answers = control.all_gather_bytes(struct.pack("<q", sent), label="clocks of ranks")
        arrived = now()
        for rank, answer in enumerate(answers):
            bounds[rank] = min(bounds[rank], arrived - struct.unpack("<q", answer)[0])
    form = f"<{group.world_size}q"
    table = [
        struct.unpack(form, row)
        for row in control.all_gather_bytes(struct.pack(form, *bounds), label="differences of clocks")
    ]
    most, least = table[group.rank][0], -table[0][group.rank]
    if group.rank == 0:
        return Reading(now(), 0.0, 0.0)
    return Reading(now(), (most + least) / 2, (most - least) / 2)


def on_rank_0(time: int, readings: list[Reading]) -> float:
    """What rank 0's clock says at ``time`` of this rank's: clocks that drift, drift evenly between two readings."""
    if not readings:
        return float(time)
    first, last = readings[0], readings[-1]
    if last.at <= first.at or abs(last.ahead - first.ahead) <= first.error + last.error:
        best = min(readings, key=lambda reading: reading.error)
        return time - best.ahead  # no drift that could be told from the error
    part = min(1.0, max(0.0, (time - first.at) / (last.at - first.at)))
    return time - (first.ahead + part * (last.ahead - first.ahead))
