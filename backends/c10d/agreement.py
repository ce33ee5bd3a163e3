"""How ranks say, in the store, that they are about to do the same; see [Note: call order]."""

from __future__ import annotations

import contextlib
import time
import zlib
from datetime import timedelta

from ..diagnosis.store_thread import STORE_THREAD, NoAnswer
from ..torch_types import Store
from .call_order import Key

_LATE = 1.0  # seconds beyond its time that a poll may take
_PAUSES = (0.0, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2)  # seconds between looks


class Agreement:
    """All ranks say that they are about to do the same; has the form of a work of torch.distributed.

    Args:
        store: of the group.
        channel: whose calls it is about.
        number: counts the channel's agreements.
        key: what this rank is about to do.
        timeout: of the group.

    Raises:
        NoAnswer: the store has not answered by then.
    """

    def __init__(
        self, store: Store, channel: str, number: int, key: Key, world_size: int, timeout: timedelta
    ) -> None:
        self._store = store
        self._place = f"shardkit/agreement/{channel}"
        self._done = f"{self._place}/{number}/all"
        self._completed = False
        STORE_THREAD.ask(lambda: self._say(number, key, world_size), timeout.total_seconds(), patient=True)

    def _say(self, number: int, key: Key, world_size: int) -> None:
        store = self._store
        mine = f"{self._place}/{number}/{zlib.crc32(repr(key).encode())}"
        if store.add(mine, 1) == world_size:
            store.set(self._done, "")
            if number > 1:  # all have come here, so nobody looks at those before any more
                store.delete_key(f"{self._place}/{number - 1}/all")
            store.delete_key(mine)

    def is_completed(self) -> bool:
        """Whether a wait has seen it."""
        return self._completed

    def wait(self, timeout: timedelta = timedelta()) -> None:
        """Raises RuntimeError when the time is over."""
        seconds = timeout.total_seconds()
        until = time.monotonic() + seconds
        with contextlib.suppress(NoAnswer):
            self._completed = STORE_THREAD.ask(lambda: self._poll(until), seconds + _LATE, patient=True)
        if not self._completed:
            raise RuntimeError("the agreement timed out")

    def _poll(self, until: float) -> bool:
        looks = 0
        while not self._store.check([self._done]):
            if time.monotonic() > until:
                return False
            time.sleep(_PAUSES[min(looks // 8, len(_PAUSES) - 1)])
            looks += 1
        return True
