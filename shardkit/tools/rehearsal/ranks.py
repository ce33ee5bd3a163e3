"""State that each simulated rank of a rehearsal has of its own, which a process has for itself; and what it does."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import NamedTuple
from unittest import mock

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves
from torch.utils.data import BatchSampler, DataLoader

from shardkit.backends.diagnosis.stack_report import Call, SourceLine, here
from shardkit.backends.simulated import SimulatedGroup
from shardkit.backends.simulated.rank_threads import Condition, RankThreads
from shardkit.optimizers.shards import take_part
from shardkit.torch_seams.tensors import LiveTensors, parts_with_memory
from shardkit.types import StateDict, Tree


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
        seconds, waited: how long it took by the ranks' clock, and how much of that it waited for others.
        last_words: what it has printed last, where that was not shown.
    """

    # in the order of their last step
    by_optimizer: dict[int, list[list[float]]] = field(default_factory=dict)
    pending: list[float] = field(default_factory=list)
    loaders: list[Loader] = field(default_factory=list)
    calls: Counter[Sent] = field(default_factory=Counter)
    sent: Counter[Sent] = field(default_factory=Counter)
    peak: int = 0
    seconds: float = 0.0
    waited: float = 0.0
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
        environment: its variables.
        world: torch.distributed's lists of process groups, as far as it was asked for them.
        main: the script's module.
        memory: counts it, where that was asked for.
    """

    number: int
    everyone: SimulatedGroup
    environment: dict[str, str]
    world: StateDict = field(default_factory=dict)
    main: ModuleType | None = None
    memory: RankMemory | None = None
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
    """Makes this thread the rank's."""
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


# ------------------------------------------------------------ what ranks do
# Steps, losses, passes over data, what they send. The script does nothing for it.
class EnoughSteps(BaseException):
    """A rank has made as many steps as were asked for; no error, so that no ``except Exception`` keeps it."""


AfterStep = Callable[[int, Optimizer], None]


class _Nothing:
    """Makes shardkit's own hooks come before ours: what they undo after a step is undone when we end it."""

    def before(self, optimizer: Optimizer) -> None: ...
    def after(self, optimizer: Optimizer) -> None: ...


_NOTHING = _Nothing()


class _Inside(threading.local):
    """How many optimizers' steps, or backwards, this thread is inside of."""

    depth = 0


class Goal:
    """After so many steps of an optimizer a rank waits for the others; when all have come so far, all end.

    Where the others wait for this one elsewhere, it goes on: it trains something by itself, or they would hang.
    """

    def __init__(self, steps: int, threads: RankThreads) -> None:
        self._steps, self._threads = steps, threads
        self._there: set[int] = set()

    def reached(self, rank: Rank, made: int) -> None:
        """Notes that ``rank`` has made that many."""
        if made < self._steps:
            return
        self._there.add(rank.number)
        awaited = Condition(lambda: self._there >= self._threads.left, optional=True)
        call = Call("steps", made, f"its step {made}, the last of the rehearsal,", 0, "")
        self._threads.wait(rank.number, awaited, call)
        if not awaited.released:
            raise EnoughSteps
        self._there.discard(rank.number)


class WholeBatches:
    """Lets one rank draw in a step what many ranks drew together.

    Args:
        passes: one of these ranks' passes over DataLoaders.
        ranks: how many they were.

    [Note: one process beside many] A DistributedSampler deals out samples in turns. So the k-th batches of all ranks
    together are the k-th batch of one rank with a batch size that is as many times larger. A script that divides a
    global batch size itself has the larger one already: then nothing is changed.
    """

    def __init__(self, passes: Sequence[Loader], ranks: int) -> None:
        self._passes, self._ranks = iter(passes), ranks

    def enlarge(self, loader: Tree) -> None:
        """Notes that the next pass is over ``loader``."""
        before, sampler = next(self._passes, None), loader.batch_sampler
        if before is None or type(sampler) is not BatchSampler or not before.batch_size:
            return
        if sampler.batch_size == before.batch_size:
            sampler.batch_size *= self._ranks


@contextlib.contextmanager
def watching(
    goal: Goal | None, batches: WholeBatches | None = None, after_step: AfterStep | None = None
) -> Iterator[None]:
    """Keeps, inside, the :class:`RankRecord` of each rank, and ends ranks at the goal."""
    mine = _Inside()

    def before(optimizer: Optimizer, args: object, kwargs: object) -> None:
        mine.depth += 1

    def after(optimizer: Optimizer, args: object, kwargs: object) -> None:
        mine.depth = max(0, mine.depth - 1)
        rank = current()
        if rank is None or mine.depth:  # an optimizer inside of another one
            return
        steps = rank.seen.by_optimizer.pop(id(optimizer), [])
        steps.append(rank.seen.pending)
        rank.seen.by_optimizer[id(optimizer)], rank.seen.pending = steps, []
        if after_step is not None:
            after_step(rank.number, optimizer)
        if goal is not None:
            goal.reached(rank, len(steps))

    take_part(_NOTHING)
    with ExitStack() as stack:
        for handle in (register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)):
            stack.callback(handle.remove)
        for owner, name, replace in (
            (torch.Tensor, "backward", _noting_losses),
            (DataLoader, "__iter__", functools.partial(_noting_loaders, batches)),
            (torch.UntypedStorage, "resize_", resizing),
        ):
            stack.enter_context(mock.patch.object(owner, name, replace(getattr(owner, name))))
        yield


def _noting_losses(backward: Callable[..., None]) -> Callable[..., None]:
    mine = _Inside()

    @functools.wraps(backward)
    def noting(loss: torch.Tensor, *args: object, **kwargs: object) -> None:
        rank = current()
        if rank is not None and not mine.depth and type(loss) is torch.Tensor and loss.numel() == 1:
            rank.seen.pending.append(float(loss.detach()))
        mine.depth += 1  # torch calls it again where a mode is around it
        try:
            backward(loss, *args, **kwargs)
        finally:
            mine.depth -= 1

    return noting


def _noting_loaders(whole: WholeBatches | None, iterate: Callable[..., Tree]) -> Callable[..., Tree]:
    @functools.wraps(iterate)
    def noting(loader: Tree) -> Tree:
        rank = current()
        if rank is not None:
            if whole is not None:
                whole.enlarge(loader)
            try:
                batches: int | None = len(loader)
            except (TypeError, NotImplementedError):
                batches = None
            rank.seen.loaders.append(Loader(here(), batches, loader.batch_size))
        return iterate(loader)

    return noting


def note_call(rank: Rank, call: Call, place: SourceLine, size: int, world_size: int) -> None:
    """Notes a collective over ``size`` bytes among ``world_size`` ranks."""
    kind = Sent(call.operation.partition("(")[0], place)
    rank.seen.calls[kind] += 1
    if call.operation == "send":
        rank.seen.sent[kind] += size
    elif call.operation != "recv":
        twice = 2 if call.operation.startswith("all_reduce") else 1
        rank.seen.sent[kind] += twice * size * (world_size - 1) // world_size


# ------------------------------------------------------------ memory
class RankMemory(LiveTensors):
    """Counts the bytes of the storages that a rank's operations make, for as long as they live.

    Args:
        threads: what they do for all ranks together does not count.
    """

    def __init__(self, rank: Rank, threads: RankThreads) -> None:
        super().__init__()
        self._rank, self._threads = rank, threads

    def add(self, tensors: object) -> None:
        if not self._threads.is_finishing:
            given = [t for t in tree_leaves(tensors) if isinstance(t, torch.Tensor)]
            super().add([part for t in given for part in parts_with_memory(t) if not part.is_meta])

    def grown(self) -> None:
        self._rank.seen.peak = max(self._rank.seen.peak, self.bytes)


def resizing(resize: Callable[..., Tree]) -> Callable[..., Tree]:
    """Wraps ``UntypedStorage.resize_``, by which sharded models take and give back memory: no operation tells of it."""

    def resize_(storage: torch.UntypedStorage, size: int) -> Tree:
        result = resize(storage, size)
        rank = current()
        if rank is not None and rank.memory is not None:
            rank.memory.count(storage)
        return result

    return resize_
