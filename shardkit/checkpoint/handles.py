"""Checkpoints that are being written in the background, and who waits for them."""

from __future__ import annotations

import threading
from collections.abc import Callable

# By rank: ranks may be threads of one process. What is written in the background is waited for by the next save.
_running: dict[int, Handle] = {}


class Handle:
    """A checkpoint that is being written, or has been.

    Attributes:
        path: of its folder, once it is complete.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def __repr__(self) -> str:
        how = "failed" if self.done and self._error else "complete" if self.done else "being written"
        return f"Handle({self.path!r}, {how})"

    @property
    def done(self) -> bool:
        """Whether :meth:`wait` would return, or raise, at once."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until the checkpoint is complete on the disk, with the files of all ranks.

        Args:
            timeout: in seconds.

        Returns:
            Whether it is; else the time is over.

        Raises:
            ShardkitError: it could not be written on some rank; raised on all ranks that wait, and by the next save.
        """
        if self._thread is not None:
            self._thread.join(timeout)
            if self._thread.is_alive():
                return False
        error, self._error = self._error, None
        if error is not None:
            raise error
        return True

    def start(self, rank: int, work: Callable[[], None]) -> None:
        """Begins, in a thread that the end of the program waits for."""

        def run() -> None:
            try:
                work()
            except Exception as error:  # noqa: BLE001 - raised where the training waits
                self._error = error

        self._thread = threading.Thread(target=run, name="shardkit checkpoint")
        _running[rank] = self
        self._thread.start()


def wait_for_earlier(rank: int) -> None:
    """Waits for this rank's earlier save; what went wrong is told to the next one."""
    handle = _running.get(rank)
    if handle is not None and handle._thread is not None:
        handle._thread.join()


def join_earlier(rank: int) -> None:
    """Waits for this rank's earlier save.

    Raises:
        ShardkitError: it failed, and nobody was told yet.
    """
    handle = _running.pop(rank, None)
    if handle is not None:
        handle.wait()
