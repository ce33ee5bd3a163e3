"""Named ranges of what a step does, for profilers and for this package's own listeners.

[Note: ranges] Whoever communicates has an object of :class:`Ranges`, each attribute of which opens a range when it is
called: ``with unit.ranges.gather(): ...``. While nobody listens, an attribute is a partial of a class written in C,
which a running torch.profiler shows and which costs no Python call. While somebody listens, the same attribute of all
these objects makes Python objects that take the time. So nothing is asked in a step, and nothing is called that is not
needed.
"""

from __future__ import annotations

import functools
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol, TypeAlias

import torch

# Written in C: it costs no Python call and records nothing unless a profiler runs. (torch.profiler.record_function
# makes some fifteen Python calls each time, profiler or not.)
Phase = torch._C._profiler._RecordFunctionFast

Range: TypeAlias = AbstractContextManager[object, None]

now = time.perf_counter_ns


class What(NamedTuple):
    """Says what a range is of.

    Attributes:
        kind: as ``all_gather``; ``all_gather.wait`` is the time in which this rank waits for it.
        unit: whose it is: a path in the model, or another name.
        ranks: global ranks that take part; none where it is no collective.
        nbytes: of what is gathered or reduced, over all ranks.
    """

    kind: str
    unit: str
    ranks: tuple[int, ...] = ()
    nbytes: int = 0

    @property
    def name(self) -> str:
        return f"shardkit.{self.kind}({self.unit})"


class Listener(Protocol):
    """Hears of ranges as they end.

    Attributes:
        mark: notes a time on the device's current stream; None where there is no such time.
    """

    mark: Callable[[], object] | None

    def on_range(self, what: What, start: int, end: int, marks: tuple[object, object] | None) -> None:
        """Notes that a range of this rank has ended; ``start`` and ``end`` are of :func:`now`."""

    def on_number(self, name: str, value: torch.Tensor) -> None:
        """Takes a number that has been computed anyway, such as the norm of the gradients."""


# ------------------------------------------------------------ who listens
_lock = threading.Lock()
_objects: weakref.WeakSet[Ranges] = weakref.WeakSet()
# By thread: ranks may be threads of one process.
_listeners: dict[int, tuple[Listener, ...]] = {}
_others: tuple[Listener, ...] = ()  # of threads that autograd or a device has


listening = False  # whether anybody does; looked at where a call would cost more


def listeners_here() -> tuple[Listener, ...]:
    """Lists those of the rank that the calling thread belongs to."""
    return _listeners.get(threading.get_ident(), _others)


def listen(listener: Listener) -> None:
    """Lets ``listener`` hear of the ranges of the calling thread's rank, from now on."""
    with _lock:
        me = threading.get_ident()
        _listeners[me] = (*_listeners.get(me, ()), listener)
        _changed()


def stop_listening(listener: Listener) -> None:
    """Does the opposite; from any thread."""
    with _lock:
        for thread, found in list(_listeners.items()):
            left = tuple(other for other in found if other is not listener)
            if left:
                _listeners[thread] = left
            else:
                del _listeners[thread]
        _changed()


def _changed() -> None:
    global _others, listening
    listening = bool(_listeners)
    _others = next(iter(_listeners.values())) if len(_listeners) == 1 else ()
    for ranges in list(_objects):
        ranges.bind()


def report_number(name: str, value: torch.Tensor) -> None:
    """Tells listeners of this rank a number; asked for only while somebody listens."""
    for listener in listeners_here():
        listener.on_number(name, value)


class Heard:
    """A range while somebody listens; it may be left twice."""

    __slots__ = ("_listeners", "_marks", "_phase", "_start", "_what")

    def __init__(self, what: What) -> None:
        self._what = what
        self._listeners: tuple[Listener, ...] = ()

    def __enter__(self) -> Heard:
        self._phase = Phase(self._what.name)
        self._phase.__enter__()
        self._listeners = listeners_here()
        self._marks = [None if one.mark is None else one.mark() for one in self._listeners]
        self._start = now()
        return self

    def __exit__(self, *error: object) -> None:
        end = now()
        listeners, self._listeners = self._listeners, ()
        for one, before in zip(listeners, self._marks, strict=False):
            marks = None if before is None or one.mark is None else (before, one.mark())
            one.on_range(self._what, self._start, end, marks)
        leave(self._phase)


def leave(entered: Range) -> None:
    """Ends a range that does not end with a ``with`` block; twice does no harm."""
    try:
        entered.__exit__(None, None, None)
    except RuntimeError:
        return  # a profiler was started inside of it, or it has ended


def span(name: str) -> Range:
    """Makes a range of a program's own, in profiles and in traces; nothing where neither runs.

    ::

        with shardkit.span("augmentation"):
            batch = augment(batch)
    """
    return Heard(What("range", name)) if listening else Phase(f"shardkit.range({name})")


# ------------------------------------------------------------ objects of ranges
def opens(kind: str) -> functools.partial[Range]:
    """Declares an attribute of :class:`Ranges`; each object has its own in its place."""
    phase: Callable[[str], Range] = Phase
    return functools.partial(phase, kind)


class Ranges:
    """Ranges of one owner: a unit, a bucket, a module, an optimizer's parameters. Each attribute opens those of a kind.

    Args:
        unit: whose they are, in their names.
        ranks: that take part in its collectives.
        nbytes: of what is gathered or reduced, by attribute.
    """

    forward = opens("forward")
    backward = opens("backward")  # a moment: backward goes into the unit
    finish = opens("backward.end")
    gather = opens("all_gather")
    gather_wait = opens("all_gather.wait")
    reshard = opens("reshard")
    reduce = opens("reduce_scatter")
    reduce_wait = opens("reduce_scatter.wait")
    all_reduce = opens("all_reduce")
    exchange = opens("all_to_all")
    exchange_wait = opens("all_to_all.wait")
    buffers = opens("broadcast")
    summon = opens("summon")
    clip = opens("clip")
    norm = opens("norm.wait")
    overflow = opens("overflow.wait")
    update = opens("update")

    def __init__(self, unit: str, ranks: tuple[int, ...] = (), **nbytes: int) -> None:
        self._whats = {name: What(kind, unit, ranks, nbytes.get(name, 0)) for name, kind in _KINDS.items()}
        with _lock:
            _objects.add(self)
            self.bind()

    def bind(self) -> None:
        heard = bool(_listeners)
        for attribute, what in self._whats.items():
            opens = functools.partial(Heard, what) if heard else functools.partial(Phase, what.name)
            setattr(self, attribute, opens)


_KINDS = {name: it.args[0] for name, it in vars(Ranges).items() if isinstance(it, functools.partial)}
CLIP = Ranges("gradients")  # what is done to them between backward and step
UNNAMED = Ranges("unnamed")  # of units before the first forward of their root
