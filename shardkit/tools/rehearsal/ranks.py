"""State that each simulated rank of a rehearsal has of its own, which a process has for itself."""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import NamedTuple

from shardkit.backends.diagnosis.calls import SourceLine
from shardkit.backends.simulated.group import SimulatedGroup
from shardkit.types import StateDict


class Sent(NamedTuple):
    """Collectives of one kind that a rank has issued from one line."""

    operation: str
    place: SourceLine


class Loader(NamedTuple):
    place: SourceLine
    batches: int | None  # None: it does not know
    batch_size: int | None


@dataclass
class RankRecord:
    """Records what a rank did.

    Attributes:
        steps: how many the optimizer has made that stepped last.
        losses: of each of these, what ``backward`` was called on before.
        calls, sent: collectives, and bytes that a rank sends for them on average over ranks.
        peak: bytes in tensors, at most.
        last_words: what it has printed last, where that was not shown.
    """

    by_optimizer: dict[int, list[list[float]]] = field(
        default_factory=dict
    )  # in the order of their last step
    pending: list[float] = field(default_factory=list)
    loaders: list[Loader] = field(default_factory=list)
    calls: Counter[Sent] = field(default_factory=Counter)
    sent: Counter[Sent] = field(default_factory=Counter)
    peak: int = 0
    last_words: list[str] = field(default_factory=list)

    @property
    def losses(self) -> list[list[float]]:
        return list(self.by_optimizer.values())[-1] if self.by_optimizer else []

    @property
    def steps(self) -> int:
        return len(self.losses)


@dataclass
class Rank:
    """One of the ranks; what is not listed here they share.

    Attributes:
        everyone: carries what concerns all ranks, apart from the script's own groups.
        environment: variables that it has set, or sees otherwise than the process; None: deleted.
        world: torch.distributed's lists of process groups, as far as it was asked for them.
        main: the script's module.
    """

    number: int
    everyone: SimulatedGroup
    environment: dict[str, str | None]
    world: StateDict = field(default_factory=dict)
    main: ModuleType | None = None
    seen: RankRecord = field(default_factory=RankRecord)

    @property
    def world_size(self) -> int:
        return self.everyone.world_size


_here = threading.local()


def current() -> Rank | None:
    """Returns the rank that the calling thread belongs to."""
    return getattr(_here, "rank", None)


@contextmanager
def acting_as(rank: Rank) -> Iterator[None]:
    """This thread is the rank's."""
    _here.rank = rank
    try:
        yield
    finally:
        _here.rank = None


def starting(start: Callable[[threading.Thread], None]) -> Callable[[threading.Thread], None]:
    """Makes a ``Thread.start`` for which threads that a rank starts belong to it."""

    def started(thread: threading.Thread) -> None:
        rank = current()
        if rank is not None:
            run = thread.run

            def as_rank() -> None:
                with acting_as(rank):
                    run()

            thread.run = as_rank  # type: ignore[method-assign]
        start(thread)

    return functools.wraps(start)(started)
