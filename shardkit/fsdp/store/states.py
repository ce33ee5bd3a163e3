"""What the memory of a flat parameter means at a time, and how that changes.

::

        RELEASED --start--> GATHERING --finish--> GATHERED <--lock, unlock--> LOCKED
           ^ |   --start, where there is nothing to wait for--> GATHERED
           | |
           | |   GATHERED, LOCKED --release--> RELEASED,
           | |   or from GATHERED to KEPT, from where the next gathering starts too
           | v
        SUMMONED
"""

from __future__ import annotations

from enum import Enum


class State(Enum):
    """What original parameters are at a time."""

    RELEASED = "they have shapes, and no memory of their own"
    KEPT = "released; ranks of the post-forward mesh keep the values between them, each a part"
    GATHERING = "their memory is taken, and an all-gather that nobody has waited for writes to it"
    GATHERED = "they have their values"
    LOCKED = "gathered for backward: autograd has their values, and nobody else may read or write them"
    SUMMONED = "they have values in full precision, in memory of their own"


# By names of the module: up to Python 3.11 an attribute of an Enum costs a Python call.
RELEASED, KEPT, GATHERING, GATHERED, LOCKED, SUMMONED = State
FULL = (GATHERED, LOCKED, GATHERING)  # the memory is in use

# What may follow what; held by the tests, not in each step.
TRANSITIONS: dict[State, tuple[State, ...]] = {
    RELEASED: (GATHERING, GATHERED, SUMMONED),
    KEPT: (GATHERING, RELEASED, SUMMONED),
    GATHERING: (GATHERED, RELEASED),  # released where the all-gather failed
    GATHERED: (LOCKED, RELEASED, KEPT),
    LOCKED: (GATHERED, RELEASED),
    SUMMONED: (RELEASED, KEPT),
}
