"""One replica at a time runs Python, and each has its own host random state.

torch's CPU generator, ``random`` and numpy's global generator belong to the process. With replicas as threads,
``torch.manual_seed(0); Net()`` would draw from a generator that other replicas advance. So a replica holds
the turn until it has to wait for another one, and the host's random states change hands with it: every
replica draws as if it were a process of its own. Threads of Python hold the interpreter's lock in turn
anyway, so little time is lost; compiled programs run meanwhile on the runtime's own threads.

Not covered: generators that a program shares between replicas itself, and threads it starts.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..random_states import HostRandomStates, host_random_states, set_host_random_states

SEED = 20_000_003  # ranks start differently, as processes do, but the same in each run


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


class Turns:
    """Gives the turn to one replica at a time. A replica's first turn starts from ``SEED`` + its rank."""

    def __init__(self, world_size: int) -> None:
        self._changed = threading.Condition()
        self._holder: int | None = None
        self._last: int | None = None
        self._states: list[HostRandomStates | None] = [None] * world_size

    def take(self, rank: int) -> None:
        with self._changed:
            while self._holder is not None:
                self._changed.wait()
            self._holder = rank
            if self._last != rank:
                if self._last is not None:
                    self._states[self._last] = host_random_states()
                state = self._states[rank]
                if state is None:
                    _seed(SEED + rank)
                else:
                    set_host_random_states(state)
                self._last = rank

    def give(self) -> None:
        with self._changed:
            self._holder = None
            self._changed.notify_all()

    @contextmanager
    def given(self, rank: int) -> Iterator[None]:
        """Lets others run inside of the block, which waits for something that may depend on them."""
        self.give()
        try:
            yield
        finally:
            self.take(rank)
