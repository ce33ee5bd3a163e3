"""What a rank does while a collective on torch.distributed does not come to its end, and which error ends its wait."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable
from typing import Any, NoReturn, ParamSpec, Protocol

import torch

from shardkit.backend import Work
from shardkit.errors import OutOfStepError, RankLostError, ShardkitError
from shardkit.types import T

from ..diagnosis.calls import Call, CallFacts
from ..diagnosis.thread_position import uncounted
from ..diagnosis.watch import Watch
from .agreement import Agreement
from .connections import never_destroy

SLICE = datetime.timedelta(seconds=2)  # a wait that is no longer costs nothing
_LOOK = datetime.timedelta(seconds=1)  # between looks afterwards
_WARN_SECONDS = 30.0
_TOKEN = torch.zeros(1)
_PROBE_TAG = 0x5AFD
_LOST = (
    "Connection closed",
    "Connection reset",
    "Connection timed out",
    "Broken pipe",
    "Socket closed",
    "closed by peer",
    "Connection refused",
    "No route to host",
    "Network is unreachable",
    "Timed out waiting",
    "pair closure",  # of gloo: an earlier wait was ended
    "gloo/transport/",
    "ncclRemoteError",
)


P = ParamSpec("P")


class TorchWork(Protocol):
    """What torch's works have, and an agreement."""

    def is_completed(self) -> bool: ...

    def wait(self, timeout: datetime.timedelta = ..., /) -> object: ...


class C10dWork(Work):
    """Collectives in flight that were issued as one call, and what is left to do on this rank afterwards."""

    __slots__ = ("_after", "_call", "_group", "_works")

    def __init__(
        self, group: Waiting, works: list[TorchWork], call: CallFacts, after: Callable[[], None] | None
    ) -> None:
        self._group, self._works, self._call, self._after = group, works, call, after

    def is_done(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def wait(self) -> None:
        for work in self._works:
            try:
                work.wait(SLICE)
            except RuntimeError as error:
                self._group.wait_on(work, error, Call(*self._call))
        self._works = []
        after, self._after = self._after, None
        if after is not None:
            after()


class Waiting:
    """The part of a group that waits.

    Attributes:
        process_group: torch's object.
        ranks: global rank of each member; ``rank`` is the place of this one.
    """

    process_group: Any
    rank: int
    ranks: tuple[int, ...]
    _name: str  # of the channel
    _sequence: int  # counts its calls
    _timeout: datetime.timedelta
    _watch: Watch
    _root: Waiting  # all ranks of that group are connected
    _probes: list[TorchWork]  # works that may never end

    def wait_on(self, work: TorchWork, error: RuntimeError, call: Call) -> None:
        """Goes on waiting for a work that did not come through at once."""
        began = time.monotonic() - SLICE.total_seconds()
        limit = self._timeout.total_seconds()
        warn_at = _WARN_SECONDS
        while True:
            if work.is_completed():  # it came through, or failed, just after its slice of time
                try:
                    work.wait()
                    self._watch.arrived()
                    return
                except RuntimeError as final:
                    self._raise(final, call)
            if "timed out" not in str(error).lower():
                self._raise(error, call)
            waited = time.monotonic() - began
            if waited >= limit:
                self._give_up(call)
            if waited >= warn_at:
                self._watch.warn(call, waited)
                warn_at *= 2
            try:
                self._watch.look(call)
            except ShardkitError:
                never_destroy()
                raise
            if isinstance(work, Agreement) and waited > 1.5 * SLICE.total_seconds():
                self._probe(call)
            try:
                work.wait(min(_LOOK, datetime.timedelta(seconds=max(0.1, limit - waited))))
                self._watch.arrived()
                return
            except RuntimeError as again:
                error = again

    def _give_up(self, call: Call) -> NoReturn:
        """Nobody knows why ``call`` does not come to its end."""
        never_destroy()
        message = (
            f"rank {self.rank} waited {self._timeout} (the process group's timeout) in {call.describe()}, and no rank "
            f"says why: a rank of {list(self.ranks)} is stopped or can't be reached. If a step may take as long, pass "
            "a longer timeout= to init_process_group or new_group"
        )
        self._watch.fail(message, lost=True)
        raise RankLostError(message)

    def _raise(self, error: RuntimeError, call: Call) -> NoReturn:
        never_destroy()
        lost = any(sign in str(error) for sign in _LOST)
        said = self._watch.last_words(call) if lost else ""
        self._watch.fail(said or f"{error} in {call.describe()}", lost=lost and not said)
        if said:  # it left because of an error that concerns this rank too
            raise OutOfStepError(said) from error
        if lost:
            raise RankLostError(
                f"rank {self.rank} lost another rank of the group (ranks {list(self.ranks)}) during {call.describe()}. "
                f"That rank died or left; its own output says why. ({error})"
            ) from error
        raise error

    def _start(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Issues on the process group; connections that broke before show here."""
        try:
            return call(*args, **kwargs)
        except RuntimeError as error:
            self._raise(error, Call(self._name, self._sequence + 1, "collective", 0, ""))

    def _probe(self, call: Call) -> None:
        """Sends a token that nobody has to receive: an agreement uses no connection that could tell of a lost rank."""
        root = self._root
        for rank, of_job in enumerate(self.ranks):
            if rank == self.rank or self._watch.hears_of(rank):
                continue
            try:
                with uncounted(root.process_group):
                    work = root.process_group.send([_TOKEN], root.ranks.index(of_job), _PROBE_TAG)
                self._probes.append(work)
            except RuntimeError as error:
                self._raise(error, call)
