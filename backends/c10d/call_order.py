"""The order of a channel's calls, on which ranks agree whenever it is new.

[Note: call order] Whatever arrives is given to whoever waits in the same place of a channel. If ranks are in different
calls there, gloo takes bytes of one for the other's, or ends the process where there are more than were expected. Where
calls have one order on all ranks (gathers: each is waited for before the next can matter), a channel keeps that order.
Having issued the same calls so far, all ranks predict the same next one: what followed the last time. A call that was
predicted is issued at once. Any other is issued when all ranks have said, in the store, that it is their next one too.
So ranks that part wait for each other before a wrong byte is sent: one in the predicted call and one for an agreement,
or each for another agreement, which the watch finds. A step that is like the one before it costs a comparison a call.
"""

from __future__ import annotations

import contextlib
import time
import zlib
from datetime import timedelta

from torch._C._distributed_c10d import Store

from ..diagnosis.job_store import STORE_THREAD, NoAnswer

Key = tuple[str, int, str]  # operation, numel, label

ORDERED_CHANNELS = ("parameters",)
_LONGEST = 4096  # calls that are remembered
_CONTEXT = 32  # calls that tell which of several earlier places this one is like


class CallOrder:
    """Predicts calls from earlier ones; deterministic, so that ranks that have issued the same predict the same.

    Attributes:
        history: the calls so far, and
        next: the place in it of the call that is predicted; the caller moves it on, and appends, when it comes true.
    """

    def __init__(self) -> None:
        self.history: list[Key] = []
        self.next = 0

    def expects(self, key: Key) -> bool:
        """Whether this call was predicted; then it is noted."""
        history, at = self.history, self.next
        if at < len(history) and history[at] == key:
            history.append(history[at])
            self.next = at + 1
            if len(history) > 2 * _LONGEST:
                self._forget()
            return True
        return False

    def turn(self, key: Key) -> None:
        """Notes a call that was not predicted."""
        self.history.append(key)
        if len(self.history) > 2 * _LONGEST:
            self._forget()
        self.next = self._place_like_this()

    def _forget(self) -> None:
        del self.history[:_LONGEST]
        self.next = max(0, self.next - _LONGEST)

    def _place_like_this(self) -> int:
        """After the earlier place that the most calls lead to as they led here; the latest of those."""
        history = self.history
        last, best, found = len(history) - 1, 0, len(history)
        for j in range(last - 1, -1, -1):
            if history[j] != history[last]:
                continue
            alike = 1
            while alike < _CONTEXT and alike <= j and history[j - alike] == history[last - alike]:
                alike += 1
            if alike > best:
                best, found = alike, j + 1
                if alike == _CONTEXT:
                    break
        return found


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
