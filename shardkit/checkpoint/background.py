"""Tells all ranks what happened on each: where ranks meet, and in the background by files in a folder."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import threading
import time
from collections.abc import Callable

from .. import errors
from ..checks import all_gather_facts
from ..errors import CheckpointError, FileNotWrittenError, ShardkitError
from ..optimizer_state.slots import Ranks
from ..types import T, Tree
from .data_file import index_of, name_of
from .format.folders import last_change


def attempt(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Runs some work; returns its result, or the error that it raised."""
    try:
        return work(), None
    except Exception as error:  # noqa: BLE001 - whatever it is, all ranks have to hear of it
        return None, error


def agree(ranks: Ranks, problem: Exception | None, what: str, fact: object = None) -> list[Tree]:
    """Returns each rank's fact, on every rank, unless something went wrong on one (collective).

    Args:
        problem: what went wrong on this rank.
        what: was done, for messages: "saving step 17".
        fact: see :func:`all_gather_facts`.
    """
    mine = None if problem is None else described(problem)
    if ranks.group is None:
        everybody = [(mine, fact)]
    else:
        control = ranks.group.channel("control")
        everybody = all_gather_facts(control, (mine, fact), label=what)
    for rank, (theirs, _) in zip(ranks.world, everybody, strict=True):
        if theirs is not None:
            raise raised(theirs, what, rank if ranks.size > 1 else None) from problem
    return [found for _, found in everybody]


def described(problem: BaseException) -> tuple[str, str, int | None]:
    """Returns an error as a fact: class, message and the system's number."""
    number = problem.errno if isinstance(problem, OSError) else None
    if isinstance(problem, ShardkitError):
        return type(problem).__name__, str(problem), number
    if isinstance(problem, OSError):
        return FileNotWrittenError.__name__, f"{problem.strerror or problem}: {problem.filename}", number
    return CheckpointError.__name__, f"{type(problem).__name__}: {problem}", None


def raised(fact: tuple[str, str, int | None], what: str, rank: int | None) -> ShardkitError:
    """Returns the error that all ranks raise.

    Args:
        rank: where it happened; None for here.
    """
    name, message, number = fact
    where = "" if rank is None else f" on rank {rank}"
    text = f"{what} failed{where}: {message}"
    kind = getattr(errors, name, CheckpointError)
    if kind is FileNotWrittenError:
        return FileNotWrittenError(text, number)
    try:
        return kind(text)
    except TypeError:  # an error with more arguments
        return CheckpointError(f"{what} failed{where}: {name}: {message}")


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
        """Says whether :meth:`wait` would return, or raise, at once."""
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
    """Waits for this rank's earlier save."""
    handle = _running.pop(rank, None)
    if handle is not None:
        handle.wait()


PATIENCE = 600.0  # seconds without a byte from any rank, until a save is given up
AT_THE_END = 30.0  # the same once the program has ended: another rank may have been killed
_FAILED = "failed-"


class Background:
    """One rank's part of a save in the background.

    Args:
        temporary: where ranks write.
        target: the name that the folder gets.
        what: is done, for messages.
    """

    def __init__(self, temporary: str, target: str, ranks: Ranks, what: str) -> None:
        self._temporary, self._target, self._ranks, self._what = temporary, target, ranks, what

    def run(self, write_own: Callable[[], None], complete: Callable[[], None]) -> None:
        """Writes, and waits until the checkpoint is complete."""
        try:
            self._write(write_own, complete)
            if self._ranks.rank != 0:
                self._wait_for(self._is_complete)
        except ToldOfError as told:
            raise told.cause from None

    def _write(self, write_own: Callable[[], None], complete: Callable[[], None]) -> None:
        try:
            write_own()
            if self._ranks.rank == 0:
                indices = [os.path.join(self._temporary, index_of(r)) for r in range(self._ranks.size)]
                self._wait_for(lambda: all(map(os.path.exists, indices)))
                complete()
        except ToldOfError:
            raise
        except Exception as error:
            self._tell(error)
            rank = self._ranks.world[self._ranks.rank] if self._ranks.size > 1 else None
            raise raised(described(error), self._what, rank) from error

    # ------------------------------------------------------------ waiting
    def _wait_for(self, there: Callable[[], bool]) -> None:
        pause, last = 0.005, time.time()
        while not there():
            for path in glob.glob(os.path.join(glob.escape(self._temporary), f"{_FAILED}*.json")):
                raise ToldOfError(self._read(path))
            last = max(last, min(time.time(), last_change(self._temporary)))
            over = not threading.main_thread().is_alive()
            if time.time() - last > (AT_THE_END if over else PATIENCE):
                raise CheckpointError(
                    f"nothing was written to {self._temporary} for {time.time() - last:.0f} s, and not all ranks have "
                    "finished; is one of them gone?"
                )
            time.sleep(pause)
            pause = min(0.5, pause * 1.5)

    def _is_complete(self) -> bool:
        if os.path.isdir(self._temporary):
            return False
        if os.path.isdir(self._target):
            return True
        raise CheckpointError(f"{self._what}: the checkpoint was given up on another rank")

    # ------------------------------------------------------------ telling of errors
    def _tell(self, error: Exception) -> None:
        rank = self._ranks.rank
        with contextlib.suppress(OSError):  # a disk that was full has room now
            os.unlink(os.path.join(self._temporary, name_of(rank)))
        with contextlib.suppress(OSError):
            with open(os.path.join(self._temporary, f"{_FAILED}{rank}.json"), "w") as file:
                json.dump([self._ranks.world[rank], described(error)], file)

    def _read(self, path: str) -> Exception:
        for _ in range(20):
            with contextlib.suppress(OSError, ValueError):  # being written
                with open(path) as file:
                    rank, fact = json.load(file)
                return raised(tuple(fact), self._what, rank if self._ranks.size > 1 else None)
            time.sleep(0.01)
        return CheckpointError(f"{self._what} failed on another rank ({os.path.basename(path)})")


class ToldOfError(Exception):
    """Another rank has told of an error."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause
