"""Surroundings of a program, for ranks that share a process: environment, ``__main__``, output, signals, pdb, waits.

[Note: one process, many ranks] Each of these is replaced by something that looks which rank's thread asks. All else
that a process has once (imported modules and their variables, the working directory, torch's flags) the ranks share.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import importlib.abc
import os
import pdb
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from importlib.machinery import ModuleSpec, PathFinder
from types import FrameType, ModuleType
from typing import TextIO
from unittest import mock

from shardkit.backends.diagnosis.stack_report import position_of
from shardkit.backends.diagnosis.watchdog import Stillness
from shardkit.backends.simulated.rank_threads import RankThreads
from shardkit.launching.started import variables_of_rank
from shardkit.types import Framework, StateDict, Tree

from .ranks import Rank, current, starting

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


def environment_of(rank: int, world_size: int) -> dict[str, str]:
    return {
        **os.environ,
        **variables_of_rank(rank, world_size, 29500),
        "MASTER_ADDR": "localhost",
        "OMP_NUM_THREADS": "1",
        "TORCHELASTIC_RUN_ID": "rehearsal",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
    }


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


def named_main(rank: Rank, file: str, package: str | None, spec: Tree) -> ModuleType:
    """Returns a new module ``__main__`` for the rank."""
    module = ModuleType("__main__")
    module.__dict__.update(__file__=file, __package__=package, __spec__=spec, __builtins__=__builtins__)
    module.__dict__.update(__loader__=None, __cached__=None)
    rank.main = module
    return module


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
_AT_ONCE = (
    0.05  # seconds; what is there sooner, such as a thread that starts, is no reason to pass the turn on
)


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
