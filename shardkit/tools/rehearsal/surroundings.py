"""Surroundings of a program, for ranks that share a process: environment, ``__main__``, output, signals, pdb, waits.

[Note: one process, many ranks] Each of these is replaced by something that looks which rank's thread asks. All else
that a process has once (imported modules and their variables, the working directory, torch's flags) the ranks share.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import importlib.abc
import importlib.util
import os
import pdb
import queue
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from importlib.machinery import ModuleSpec, PathFinder
from types import FrameType, ModuleType
from typing import NamedTuple, TextIO
from unittest import mock

import torch
import torch.distributed as dist
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves
from torch.utils.data import BatchSampler, DataLoader

from shardkit.backends.diagnosis.stack_report import Call, SourceLine, here, position_of
from shardkit.backends.diagnosis.watchdog import Stillness
from shardkit.backends.eager import worlds_of_ranks
from shardkit.backends.simulated import Condition, Line, RankThreads, SimulatedGroup
from shardkit.backends.simulated.process_group import ProcessGroupOfThreads
from shardkit.errors import BackendError, ConfigurationError
from shardkit.optimizers.shards import take_part
from shardkit.torch_seams.tensors import LiveTensors, parts_with_memory
from shardkit.types import Framework, StateDict, Tree

# ------------------------------------------------------------ a rank
# State that each simulated rank of a rehearsal has of its own, which a process has for itself; and what it does.


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
        if (rank := current()) is not None:
            thread.run = acting_as(rank)(thread.run)  # type: ignore[method-assign]
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
        if (rank := current()) is not None:
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


# ------------------------------------------------------------ what a process has once

_KEPT = 40  # lines of a rank whose output is not shown


class RankEnvironment(os._Environ):  # type: ignore[type-arg]
    """``os.environ``, where each rank sees its own RANK, and what a rank sets no other one sees."""

    def __getitem__(self, key: str) -> str:
        rank = current()
        found: str = super().__getitem__(key) if rank is None else rank.environment[key]
        return found

    def __setitem__(self, key: str, value: str) -> None:
        rank = current()
        if rank is None:
            super().__setitem__(key, value)
            return
        if not isinstance(value, str):
            raise TypeError(f"str expected, not {type(value).__name__}")
        rank.environment[key] = value

    def __delitem__(self, key: str) -> None:
        rank = current()
        if rank is None:
            super().__delitem__(key)
        else:
            del rank.environment[key]

    def __iter__(self) -> Iterator[str]:
        rank = current()
        yield from super().__iter__() if rank is None else list(rank.environment)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class RankMain(ModuleType):
    """``sys.modules["__main__"]``: each rank's own; other threads find the program's."""

    def __init__(self, outside: ModuleType) -> None:
        super().__init__("__main__")
        object.__setattr__(self, "outside", outside)

    def __getattribute__(self, name: str) -> Tree:
        return getattr(_main_of(self), name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(_main_of(self), name, value)

    def __delattr__(self, name: str) -> None:
        delattr(_main_of(self), name)


def _main_of(proxy: RankMain) -> ModuleType:
    rank = current()
    outside: ModuleType = object.__getattribute__(proxy, "outside")
    return outside if rank is None or rank.main is None else rank.main


class RankOutput:
    """Shows what some ranks print, and keeps the end of what the others do.

    Args:
        below: where it goes.
        shown: ranks; with more than one each line tells whose it is.
    """

    def __init__(self, below: TextIO, shown: Sequence[int]) -> None:
        self._below, self._shown = below, frozenset(shown)
        self._unfinished: dict[int, str] = {}

    def write(self, text: str) -> int:
        rank = current()
        if rank is None or self._shown == {rank.number}:
            return self._below.write(text)
        *lines, self._unfinished[rank.number] = (self._unfinished.get(rank.number, "") + text).split("\n")
        for line in lines:
            if rank.number in self._shown:
                self._below.write(f"[rank {rank.number}] {line}\n")
            else:
                rank.seen.last_words = [*rank.seen.last_words[1 - _KEPT :], line.rpartition("\r")[2]]
        return len(text)

    def writelines(self, lines: Sequence[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Tree:
        return getattr(self._below, name)


@contextlib.contextmanager
def surroundings(shown: Sequence[int]) -> Iterator[None]:
    """Makes what this module is about each rank's own, inside."""
    with ExitStack() as stack:
        kind = type(os.environ)
        os.environ.__class__ = RankEnvironment
        stack.callback(setattr, os.environ, "__class__", kind)
        for owner, name, value in (
            (sys, "stdout", RankOutput(sys.stdout, shown)),
            (sys, "stderr", RankOutput(sys.stderr, shown)),
            (sys, "breakpointhook", _breakpoint),
            (pdb, "set_trace", _breakpoint),
            (signal, "signal", _handling(signal.signal)),
            (threading.Thread, "start", starting(threading.Thread.start)),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        main = sys.modules["__main__"]
        sys.modules["__main__"] = RankMain(main)
        stack.callback(sys.modules.__setitem__, "__main__", main)
        yield


def _breakpoint(*_: object, header: str | None = None, **__: object) -> None:
    """Stops here: the other ranks wait meanwhile, for only one runs at a time."""
    rank, out = current(), sys.stdout
    below = object.__getattribute__(out, "_below") if isinstance(out, RankOutput) else out
    debugger = pdb.Pdb(stdin=sys.stdin, stdout=below, nosigint=True)
    debugger.use_rawinput = False
    if rank is not None:
        below.write(f"rank {rank.number} of {rank.world_size} stops here; the others wait\n")
    if header:
        below.write(header + "\n")
    frame: FrameType | None = sys._getframe(1)
    debugger.set_trace(frame)


def _handling(outside: Tree) -> Tree:
    """Wraps ``signal.signal``, which only the main thread may call: a rank's handlers are left out."""

    def handle(number: int, handler: Tree) -> Tree:
        if current() is None or threading.current_thread() is threading.main_thread():
            return outside(number, handler)
        return signal.getsignal(number)

    return handle


# ------------------------------------------------------------ state of libraries
_MODULE = "accelerate.state"
_CLASSES = ("PartialState", "AcceleratorState", "GradientState")  # all objects of one share ``_shared_state``


class _OwnState(threading.local):
    """A class attribute that is another dict in each thread."""

    def __init__(self) -> None:
        self.values: StateDict = {}

    def __get__(self, instance: object, owner: type | None = None) -> StateDict:
        return self.values

    def __set__(self, instance: object, values: StateDict) -> None:
        self.values = values


class _Watcher(importlib.abc.MetaPathFinder):
    """Hears of the import of accelerate."""

    def __init__(self, undo: contextlib.ExitStack) -> None:
        self._undo = undo

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name == _MODULE else None
        loader: Tree = None if spec is None else spec.loader
        if loader is not None:
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                _separate(module, self._undo)

            loader.exec_module = exec_module
        return spec


@contextlib.contextmanager
def libraries() -> Iterator[None]:
    """Gives ranks, inside, such state of their own, in libraries that are imported, or will be."""
    with contextlib.ExitStack() as undo:
        if hasattr(functools.cached_property(lambda _: None), "lock"):
            undo.enter_context(mock.patch.object(functools.cached_property, "__get__", _without_lock))
        if _MODULE in sys.modules:
            _separate(sys.modules[_MODULE], undo)
        else:
            watcher = _Watcher(undo)
            sys.meta_path.insert(0, watcher)
            undo.callback(sys.meta_path.remove, watcher)
        yield


def _without_lock(attribute: Framework, instance: object, owner: type | None = None) -> Tree:
    """Does as ``cached_property`` of Python 3.12: before, all objects of a class compute theirs under one lock.

    Where that communicates, as transformers' arguments do, a second rank would wait for the lock, and the first one for
    the second.
    """
    if instance is None:
        return attribute
    values = vars(instance)
    if attribute.attrname not in values:
        values[attribute.attrname] = attribute.func(instance)
    return values[attribute.attrname]


def _separate(module: Framework, undo: contextlib.ExitStack) -> None:
    for name in _CLASSES:
        owner = getattr(module, name, None)
        if owner is not None and "_shared_state" in vars(owner):
            undo.callback(setattr, owner, "_shared_state", vars(owner)["_shared_state"])
            owner._shared_state = _OwnState()


# ------------------------------------------------------------ waits that are no collectives
# For a thread, an event, a queue, or a file that another rank writes. While a rank waits so, the others have their
# turn: what it waits for may need them, as a checkpoint that threads of all ranks write together does.
_WAITS = (
    (threading.Thread, "join"),
    (queue.Queue, "get"),
    (concurrent.futures.Future, "result"),
    (concurrent.futures.Future, "exception"),
)
# seconds; what is there sooner, such as a thread that starts, is no reason to pass the turn on
_AT_ONCE = 0.05


@contextlib.contextmanager
def waiting_elsewhere(threads: RankThreads) -> Iterator[None]:
    """Lets these waits of a rank's thread, inside, pass its turn on."""

    def passing_on(wait: Callable[..., Tree]) -> Callable[..., Tree]:
        @functools.wraps(wait)
        def waiting(*args: object, **kwargs: object) -> Tree:
            rank = current()
            if rank is None or not threads.is_mine(rank.number):
                return wait(*args, **kwargs)
            with threads.away(rank.number):
                return wait(*args, **kwargs)

        return waiting

    def sleep(seconds: float) -> None:
        if (rank := current()) is not None and threads.is_mine(rank.number):
            threads.clock.now(rank.number, slept=seconds)
        passing_on(sleep_outside)(seconds)

    sleep_outside, wait_for_event = time.sleep, threading.Event.wait

    def event_wait(event: threading.Event, timeout: float | None = None) -> bool:
        first = _AT_ONCE if timeout is None else min(timeout, _AT_ONCE)
        return wait_for_event(event, first) or passing_on(wait_for_event)(event, timeout)

    with ExitStack() as stack:
        for owner, name in _WAITS:
            stack.enter_context(mock.patch.object(owner, name, passing_on(getattr(owner, name))))
        stack.enter_context(mock.patch.object(threading.Event, "wait", event_wait))
        stack.enter_context(mock.patch.object(time, "sleep", functools.wraps(time.sleep)(sleep)))
        yield


# ------------------------------------------------------------ ranks that do nothing
# Such a rank may wait for a lock of Python's that another rank holds, which has to wait itself in a collective: between
# processes there is no such lock, and turns can't be passed on in it. It may as well wait for data or for a person, so
# nothing is ended.
SECONDS = 30.0


@contextlib.contextmanager
def noticing_stillness(threads: RankThreads, seconds: float = SECONDS) -> Iterator[None]:
    """Tells of it inside, by a line on stderr, once for each place."""
    over = threading.Event()
    watcher = threading.Thread(
        target=_watch, args=(threads, seconds, over, sys.stderr), name="shardkit rehearsal", daemon=True
    )
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


def _watch(threads: RankThreads, seconds: float, over: threading.Event, out: TextIO) -> None:
    stillness, told = Stillness(), False
    while not over.wait(seconds / 10):
        if threads.running is None:
            continue
        rank, thread = threads.running
        position = position_of(thread.ident or 0)
        if position is None or position.in_debugger:
            continue
        is_still = stillness.seconds((rank, position.mark, _cpu_seconds(thread))) >= seconds
        if is_still and not told:
            out.write(
                f"rank {rank} has done nothing for {seconds:.0f} s, at {position.where}, and only one rank runs at a "
                "time. Does it wait for a lock that another rank holds? (--timeout ends the rehearsal)\n"
            )
        told = is_still


def _cpu_seconds(thread: threading.Thread) -> float:
    """Returns what the thread has used; 0 where the system does not tell."""
    try:
        clock = time.pthread_getcpuclockid(thread.ident or 0)
        return time.clock_gettime(clock)
    except (AttributeError, OSError):
        return 0.0


# ------------------------------------------------------------ torch.distributed
# torch.distributed for simulated ranks: every thread has process groups of its own.
#
# torch keeps what a process knows of its groups in one object, ``_world``, which may be replaced; groups are made by
# one function. Both names are torch's own: :func:`check` says what is missing in another version.

_C10D: Tree = dist.distributed_c10d
_BINDINGS: Tree = torch._C._distributed_c10d
_PLUGIN = "shardkit_rehearsal"
NAMES = (
    "_world",
    "_new_process_group_helper",
    "rendezvous",
    "_default_pg_init_method",
    "_backend",
    "BackendConfig",
)
_pending = threading.local()  # line: what the group that is being made communicates over


def check() -> None:
    """Raises BackendError naming what this version of torch has otherwise."""
    missing = [name for name in NAMES if not hasattr(_C10D, name)]
    if not hasattr(_BINDINGS, "_set_thread_isolation_mode"):
        missing.append("_set_thread_isolation_mode")
    if missing:
        raise BackendError(
            f"torch {torch.__version__} keeps its process groups otherwise than a rehearsal knows: "
            f"{', '.join(missing)}; take a version of torch that shardkit supports, or rehearse what needs no "
            "torch.distributed with shardkit.launch(..., backend='simulated')"
        )


@contextlib.contextmanager
def torch_worlds(store: SharedStore) -> Iterator[None]:
    """Makes ``torch.distributed`` of each rank's thread that of a process of its own, inside of it."""
    check()
    if _PLUGIN.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(_PLUGIN, _create, extended_api=True, devices=["cpu"])
    isolate: Callable[[bool], None] = _BINDINGS._set_thread_isolation_mode
    meets = _rendezvous(_C10D.rendezvous, store)
    with ExitStack() as stack:
        for module in (dist, sys.modules["torch.distributed.rendezvous"]):  # programs may have it from either
            stack.enter_context(mock.patch.object(module, "rendezvous", meets))
        for name, value in {
            "_world": worlds_of_ranks(lambda: getattr(current(), "world", None)),
            "_new_process_group_helper": _helper(_C10D._new_process_group_helper),
            "rendezvous": meets,
            "_default_pg_init_method": _C10D._default_pg_init_method,
            "_backend": _C10D._backend,
        }.items():
            stack.enter_context(mock.patch.object(_C10D, name, value))
        stack.enter_context(mock.patch.object(sys, "excepthook", sys.excepthook))
        isolate(True)
        stack.callback(isolate, False)
        yield


def _rendezvous(outside: Callable[..., Tree], store: SharedStore) -> Callable[..., Tree]:
    def rendezvous(url: str, rank: int = -1, world_size: int = -1, **kwargs: object) -> Tree:
        here = current()
        if here is None:
            return outside(url, rank, world_size, **kwargs)
        for name, given, true in (("rank", rank, here.number), ("world_size", world_size, here.world_size)):
            if given not in (-1, true):
                raise ConfigurationError(
                    f"rank {here.number}: init_process_group was given {name}={given}, but this is rank {here.number} "
                    f"of {here.world_size} in the rehearsal; take both from the environment (RANK, WORLD_SIZE), or "
                    f"rehearse with --ranks {given if name == 'world_size' else here.world_size}"
                )
        return iter([(store, here.number, here.world_size)])

    return rendezvous


def _helper(outside: Callable[..., Tree]) -> Callable[..., Tree]:
    """Makes groups; all ranks come here for all groups, but where a group synchronizes its members only."""

    def helper(*args: Tree, **kwargs: object) -> Tree:
        rank = current()
        if rank is None:
            return outside(*args, **kwargs)
        size, number, members, backend, store, name, *more = args
        _pending.line = _agreed_line(rank, list(members), str(name))
        kwargs.update(backend_options=None, device_id=None)
        made = outside(size, number, members, _PLUGIN, store, name, *more, **kwargs)
        group = made[0]
        if isinstance(group, ProcessGroupOfThreads):
            world = _C10D._world
            world.pg_map[group] = dist.Backend(backend), world.pg_map[group][1]
            world.pg_backend_config[group] = str(_C10D.BackendConfig(dist.Backend(backend)))
        return made

    return helper


def _agreed_line(rank: Rank, members: list[int], name: str) -> Line:
    """Agrees on what the members of a new group share; returns when all that have to call have."""
    group, told = rank.everyone, tuple[object, ...]()
    what, named = "init_process_group", "default group"
    if members and len(name) == 40:  # the name of a group that only its members know is a hash
        group, told = group.among(members, f"group of ranks {members} {name[:8]}"), (tuple(members),)
        what, named = "new_group", f"group of {members}"
    elif members:
        what, named = f"new_group({members})", f"group {name} of ranks {members}"
    line: Line = group._issue(what, 0, "", told, None, lambda _: Line(members or group.ranks, named)).result()
    return line


def _create(options: Tree, _: object) -> ProcessGroupOfThreads:
    """Makes a new group; torch calls it for each member."""
    rank = current()
    if rank is None:
        raise ConfigurationError(f"{_PLUGIN!r} serves ranks of a rehearsal only")
    everyone, line = rank.everyone, _pending.line
    below = SimulatedGroup(everyone.backend, everyone._threads, line, line.ranks.index(rank.number))
    return ProcessGroupOfThreads(below)


# ------------------------------------------------------------ the store
_Base: Tree = vars(dist)["Store"]  # mypy does not find it under its name


def _of_values(name: str) -> Callable[..., Tree]:
    """Makes a method of the store that is one of its values'."""
    return lambda store, *arguments: getattr(store._values, name)(*arguments)


class SharedStore(_Base):  # type: ignore[misc]
    """One for all ranks; who waits for a key gives the others their turn.

    Methods are those that torch's C++ calls, by its names for them; it makes all others of these.
    """

    def __init__(self, threads: RankThreads) -> None:
        super().__init__()
        self._threads, self._values = threads, dist.HashStore()  # type: ignore[attr-defined]

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._values.get(key)

    set, add, append, check, compare_set = map(_of_values, ("set", "add", "append", "check", "compare_set"))
    deleteKey, getNumKeys = map(_of_values, ("delete_key", "num_keys"))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Returns when another rank has set them all."""
        wanted = list(keys)
        if self.check(wanted):
            return
        rank = current()
        if rank is None:
            raise ConfigurationError(
                f"a thread that is no simulated rank waits for {wanted} in a rehearsal's store"
            )
        call = Call("store", 0, f"wait for {wanted}", 0, "")
        self._threads.wait(rank.number, Condition(lambda: self.check(wanted)), call)
