"""Agents of several machines hear of each other each half second, and of what has failed where.

torch's agents notice a machine that is gone only when they meet anew, and ranks only when their process group's timeout
is over. Here each agent's thread counts in a store of its own attempt, and reads how far the others have counted.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from torch.distributed import TCPStore  # type: ignore[attr-defined]

_PERIOD, _MOMENT = 0.5, 1.5  # seconds
LEFT = "left with status 0 in mid-training"
SILENCE = 6.0  # seconds after which a machine is taken to be lost


class FailureNotice(NamedTuple):
    """A failure on some machine.

    Attributes:
        is_consequence: it says no more than that another rank is gone.
        when: it happened, by that machine's clock.
    """

    rank: int
    text: str
    trace: str
    is_consequence: bool
    when: float


class Heart:
    """The thread of one attempt.

    Args:
        connect: to the attempt's store; called in the thread, for it may hang.
        number: of this machine; 0 holds the store.
        names: address and ranks of each machine, as people read them; published by each.
    """

    def __init__(
        self, connect: Callable[[], TCPStore], number: int, machines: int, name: str, holder: str
    ) -> None:
        self._connect, self._number, self._machines = connect, number, machines
        self._name, self._holder = name, holder
        self._heard = {other: time.monotonic() for other in range(machines) if other != number}
        self._counts = dict.fromkeys(self._heard, -1)
        self._names: dict[int, str] = {}
        self._round = time.monotonic()  # the last complete one
        self._to_tell: FailureNotice | None = None
        self._told: dict[int, FailureNotice] = {}
        self._stop, self._wake, self._was_told = threading.Event(), threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="shardkit-heart", daemon=True)
        self._thread.start()

    def lost(self) -> str:
        """Says which machines are silent, in a sentence; "" for none."""
        now = time.monotonic()
        if now - self._round > SILENCE:
            if self._number == 0:
                return ""  # the store is in this process: it is this machine that is slow
            return f"machine 0 ({self._holder}), where machines meet, has not answered for {now - self._round:.0f} s"
        silent = []
        for other, when in self._heard.items():
            if now - when > SILENCE and other not in self._told:
                name = self._names.get(other, "which never answered")
                silent.append(f"machine {other} ({name}) has not been heard of for {now - when:.0f} s")
        return "; ".join(silent)

    def are_through(self) -> bool:
        """Whether all ranks of all other machines have ended with status 0, or nothing is heard of them."""
        now = time.monotonic()
        return all(
            now - when > SILENCE or (other in self._told and self._told[other].text == LEFT)
            for other, when in self._heard.items()
        )

    def tell(self, failure: FailureNotice) -> None:
        """The others, at once; returns when they can know it, or after a moment."""
        self._to_tell = failure
        self._was_told.clear()
        self._wake.set()
        self._was_told.wait(_MOMENT)

    def told(self) -> list[FailureNotice]:
        """Lists what other machines have told, the first one first."""
        return sorted(self._told.values(), key=lambda t: (t.is_consequence, t.when))

    def stop(self) -> None:
        """The attempt is over. A thread that came back from the store while the program ends would abort it."""
        self._stop.set()
        self._wake.set()
        self._thread.join(_MOMENT)

    def _run(self) -> None:
        count, store = 0, None
        while not self._stop.is_set():
            with contextlib.suppress(RuntimeError, ValueError):
                store = store or self._connect()
                count += 1
                to_tell = self._to_tell
                store.set(f"beat/{self._number}", json.dumps([count, self._name, to_tell]))
                if to_tell is not None:
                    self._was_told.set()
                for other in self._heard:
                    self._hear(other, store)
                self._round = time.monotonic()
            self._wake.wait(_PERIOD)
            self._wake.clear()

    def _hear(self, other: int, store: TCPStore) -> None:
        key = f"beat/{other}"
        if not store.check([key]):
            return
        count, self._names[other], told = json.loads(store.get(key))
        if count != self._counts[other]:
            self._counts[other], self._heard[other] = count, time.monotonic()
        if told is not None:
            self._told[other] = FailureNotice(*told)


def connector(address: str, port: int) -> Callable[[], TCPStore]:
    """Returns a function that connects to the attempt's store."""

    def connect() -> TCPStore:
        limit = datetime.timedelta(seconds=SILENCE)
        return TCPStore(address, port, None, is_master=False, wait_for_workers=False, timeout=limit)

    return connect
