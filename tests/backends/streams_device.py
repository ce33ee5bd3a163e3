"""A device with streams that exists in its rules alone: what CUDA and NCCL leave to the caller, checked on the CPU.

A rank's device knows which collectives its streams still run, and which memory those read and write; every operation of
torch's tells it what it reads and writes. The collectives are those of any group below, which is called as late as
possible. Ranks are simulated (threads), or processes over gloo.

[Note: clocks] Every communicator has a stream of its own. A collective comes after all that its stream and the current
one have been given before; what the current stream is given later comes after the collective only when its work, or a
later one of the same communicator, was waited for. All computation is issued on one stream. So the vector clocks of all
streams come down to one queue for each communicator: the collectives that nothing orders before what is computed next.
An access to memory of one of them is a race, if one of the two writes. Giving memory back counts as a write: the
allocator hands it to whoever asks next on the current stream.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardkit.backend import Backend, Copy, Group, ReduceOp, Sizes, Work
from shardkit.backends.c10d.group import ORDERED_CHANNELS
from shardkit.backends.gloo import GlooBackend
from shardkit.backends.simulated import SimulatedBackend, enter_group, spoil
from shardkit.errors import OutOfStepError
from shardkit.torch_seams.tensors import parts_with_memory
from shardkit.types import Args, ProcessGroup, T, Tree

ALIGNED = 16  # bytes; what copies of NCCL and kernels take in one piece
_PLACES = 4  # frames that a report shows
_OWN = (
    "/backends/streams_device.py",
    "/shardkit/backend.py",
    "/torch/",
    "/contextlib.py",
    "/functools.py",
)


class RaceError(Exception):
    """Two accesses to the same memory, one of them a write, which nothing orders."""


class Issued(NamedTuple):
    """A collective as all ranks know it."""

    communicator: str
    operation: str
    numel: int
    label: str

    def __str__(self) -> str:
        return f"{self.operation} of {self.numel} elements ({self.label}) in {self.communicator}"


@dataclasses.dataclass(slots=True, eq=False)
class Flight:
    """A collective that the current stream has not waited for.

    Attributes:
        communicator: its name; the same on all ranks of it.
        start: hands it to the ranks below; None: done.
    """

    communicator: str
    what: str
    reads: Sequence[torch.Tensor]
    writes: Sequence[torch.Tensor]
    places: str
    start: Callable[[], None] | None

    def touching(self, begin: int, end: int, storage: int, writes: bool) -> str:
        """Says what it does with these bytes of a storage, if that must not happen beside the other access."""
        for does, tensors in (("writes", self.writes), ("reads", self.reads if writes else ())):
            for tensor in tensors:
                if tensor.untyped_storage()._cdata == storage:
                    first, last = bytes_of(tensor)
                    if first < end and begin < last:
                        return does
        return ""


class SimulatedDevice:
    """One rank's device.

    Attributes:
        misaligned: how many parts of collectives' buffers began at no multiple of 16 bytes, by what they were.
        most_in_flight: the most bytes that collectives in flight wrote at once.
        host_waits: how often the host waited for the device, by what for.
        copied: bytes between host and device, "up" and "down".
        waited_after: how many collectives had been issued when the host waited for copies.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.issued: list[Issued] = []
        self.misaligned: Counter[str] = Counter()
        self.host_waits: Counter[str] = Counter()
        self.copied: Counter[str] = Counter()
        self.waited_after: list[int] = []
        self.most_in_flight = 0
        self._flights: dict[str, deque[Flight]] = {}  # by communicator
        self._late: deque[Flight] = deque()  # not started yet, in order
        self._storages: Counter[int] = Counter()  # how many flights use each

    # ------------------------------------------------------------ collectives
    def issue(self, flight: Flight, key: Issued | None) -> None:
        """A collective was given to its communicator's stream; it starts as late as possible. None: a copy."""
        if key is not None:
            self.issued.append(key)
        for writes, tensors in ((False, flight.reads), (True, flight.writes)):
            for tensor in tensors:
                self._check(tensor, writes, flight.what, flight.communicator)
        self._flights.setdefault(flight.communicator, deque()).append(flight)
        self._late.append(flight)
        self._storages.update(_storages(flight))
        written = {t.untyped_storage()._cdata: t for f in self._in_flight() for t in f.writes}
        self.most_in_flight = max(
            self.most_in_flight, sum(t.numel() * t.element_size() for t in written.values())
        )

    def start(self) -> None:
        """Hands all that was issued to the ranks below."""
        while self._late:
            flight = self._late.popleft()
            begin, flight.start = flight.start, None
            if begin is not None:
                with quiet():
                    begin()

    def wait(self, flight: Flight) -> bool:
        """Orders what is computed from now on after this collective, and all earlier ones of its communicator.

        Returns whether it was not yet.
        """
        flights = self._flights[flight.communicator]
        was_in_flight = flight in flights
        while flight in flights:
            self._storages.subtract(_storages(flights.popleft()))
        return was_in_flight

    def unwaited(self) -> list[str]:
        """Collectives that nobody has waited for."""
        return [f.what for f in self._in_flight()]

    def _in_flight(self) -> Iterable[Flight]:
        return (f for flights in self._flights.values() for f in flights)

    # ------------------------------------------------------------ memory
    def access(self, tensor: torch.Tensor, writes: bool, what: str) -> None:
        """The current stream reads or writes a tensor."""
        if tensor.layout is not torch.strided or tensor.is_meta or not tensor.numel():
            return
        storage = tensor.untyped_storage()
        if not storage.nbytes():
            raise RaceError(f"rank {self.rank}: {what} touches memory that was given back, at {places()}")
        self._check(tensor, writes, what, None)

    def release(self, tensor: torch.Tensor) -> None:
        """A tensor's whole memory is given back."""
        storage = tensor.untyped_storage()
        if self._storages[storage._cdata] and storage.nbytes():
            self._report_conflict(0, storage.nbytes(), storage._cdata, True, "giving memory back", None)

    def _check(self, tensor: torch.Tensor, writes: bool, what: str, communicator: str | None) -> None:
        storage = tensor.untyped_storage()
        if self._storages[storage._cdata]:
            self._report_conflict(*bytes_of(tensor), storage._cdata, writes, what, communicator)

    def _report_conflict(
        self, begin: int, end: int, storage: int, writes: bool, what: str, communicator: str | None
    ) -> None:
        for name, flights in self._flights.items():
            if name == communicator:
                continue
            for flight in flights:
                does = flight.touching(begin, end, storage, writes)
                if does:
                    raise RaceError(
                        f"rank {self.rank}: {what} {'writes' if writes else 'reads'} memory that {flight.what} still "
                        f"{does}: nobody has waited for it (call its wait() first). It was issued at "
                        f"{flight.places}; this is {places()}"
                    )

    # ------------------------------------------------------------ what costs time
    def measure(self, what: str, parts: Iterable[torch.Tensor]) -> None:
        """Counts parts of buffers that begin where a device copies more slowly."""
        for part in parts:
            if part.numel() and int(part.storage_offset()) * part.element_size() % ALIGNED:
                self.misaligned[what] += 1


def bytes_of(tensor: torch.Tensor) -> tuple[int, int]:
    """The bytes of its storage from the first to behind the last that a tensor shows."""
    size = tensor.element_size()
    begin = int(tensor.storage_offset())
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin * size, (begin + last + 1) * size


def _storages(flight: Flight) -> list[int]:
    return [t.untyped_storage()._cdata for t in (*flight.reads, *flight.writes)]


def places() -> str:
    """Where the caller is: the innermost places that are not this device's own or torch's."""
    frame = sys._getframe(1)
    found: list[str] = []
    while frame is not None and len(found) < _PLACES:
        name = frame.f_code.co_filename
        if not any(part in name for part in _OWN):
            found.append(f"{'/'.join(name.rsplit('/', 3)[1:])}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back  # type: ignore[assignment]
    return " < ".join(found)


class quiet:
    """Marks what runs in this block as the device's own doing, which it does not watch."""

    __slots__ = ("_guard",)

    def __enter__(self) -> None:
        self._guard = torch._C._DisableTorchDispatch()  # type: ignore[attr-defined]

    def __exit__(self, *_: object) -> None:
        del self._guard


class _CurrentDevice(threading.local):
    device: SimulatedDevice | None = None


_here = _CurrentDevice()


def current_device() -> SimulatedDevice | None:
    """The device of the rank that calls, if there is one."""
    return _here.device


def set_current_device(device: SimulatedDevice | None) -> None:
    _here.device = device


# Of these inputs only shape, dtype and device count.
_LIKE = {
    *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like"),
    *("new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided"),
}
_FRESH = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"}
_HOST = {"_local_scalar_dense", "equal", "nonzero", "is_nonzero", "masked_select", "_unique2"}


class _OperationPlan(NamedTuple):
    """Says what an operation does with its arguments."""

    name: str
    arguments: Sequence[tuple[str, bool]]  # name, whether it is written
    is_silent: bool  # touches no memory
    is_fresh: bool  # its result has no values yet
    waits: bool  # the host waits for it


def _plan_of(func: torch._ops.OpOverload) -> _OperationPlan:
    schema = func._schema
    arguments = [(a.name, a.alias_info is not None and a.alias_info.is_write) for a in schema.arguments]
    name = schema.name.split("::")[-1]
    writes = any(w for _, w in arguments)
    is_view = not writes and any(r.alias_info is not None for r in schema.returns)
    return _OperationPlan(
        name, arguments, is_view or not arguments or name in _LIKE, name in _FRESH, name in _HOST
    )


class Watching(TorchDispatchMode):
    """Active in a rank's thread."""

    def __init__(self, device: SimulatedDevice) -> None:
        super().__init__()
        self._device = device
        self._plans: dict[torch._ops.OpOverload, _OperationPlan] = {}

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: Sequence[Tree] = (),
        kwargs: Mapping[str, Tree] | None = None,
    ) -> Tree:
        plan = self._plans.get(func)
        if plan is None:
            plan = self._plans[func] = _plan_of(func)
        if not plan.is_silent:
            self._note(plan, args, kwargs or {})
        result = func(*args, **(kwargs or {}))
        if plan.is_fresh:
            with quiet():
                for tensor in parts_with_memory(result):
                    spoil(tensor)
        return result

    def _note(self, plan: _OperationPlan, args: Sequence[Tree], kwargs: Mapping[str, Tree]) -> None:
        if plan.waits:
            self._device.host_waits[plan.name] += 1
        for (_, writes), value in zip(plan.arguments, args, strict=False):
            self._touch(value, writes, plan.name)
        if kwargs:
            written = {name for name, writes in plan.arguments if writes}
            for name, value in kwargs.items():
                self._touch(value, name in written, plan.name)

    def _touch(self, value: Tree, writes: bool, what: str) -> None:
        for tensor in value if isinstance(value, list | tuple) else (value,):
            if isinstance(tensor, torch.Tensor):
                for each in parts_with_memory(tensor):
                    self._device.access(each, writes, what)


Call = Callable[[Group], Work]


class StreamsWork(Work):
    """A collective that the current stream may have to wait for."""

    __slots__ = ("_below", "_call", "_device", "_flight", "_group")

    def __init__(self, device: SimulatedDevice, group: Group, call: Call, flight: Flight) -> None:
        self._device, self._group, self._call, self._flight = device, group, call, flight
        self._below: Work | None = None
        flight.start = self._start

    def _start(self) -> None:
        with torch.no_grad():
            self._below = self._call(self._group)

    def wait(self) -> None:
        try:
            self._device.start()
            if self._below is not None:
                with quiet():
                    self._below.wait()
        finally:
            self._device.wait(self._flight)

    def is_done(self) -> bool:
        self._device.start()
        return self._below is None or self._below.is_done()


class StreamsCopy(Copy):
    """A copy between host and device that whoever reads the result has to wait for."""

    __slots__ = ("_device", "_flight", "_is_known")

    def __init__(self, device: SimulatedDevice, way: str, out: Tensor, tensor: Tensor) -> None:
        def copy() -> None:
            with torch.no_grad():
                out.copy_(tensor)

        self._device, self._is_known = device, False  # to be done, by who waits on the host
        self._flight = Flight(f"copies {way}", f"a copy {way}", [tensor], [out], places(), copy)
        with quiet():
            spoil(out.data)
        device.copied[way] += out.numel() * out.element_size()
        device.issue(self._flight, None)

    def is_done(self) -> bool:
        self._device.start()
        self._is_known = True
        return True

    def wait(self) -> None:
        self._device.start()
        self._device.wait(self._flight)

    def wait_on_host(self) -> None:
        self._device.start()
        if self._device.wait(self._flight) and not self._is_known:
            self._device.host_waits["copy"] += 1
            self._device.waited_after.append(len(self._device.issued))


class StreamsGroup(Group):
    """A communicator of a simulated device; see :class:`shardkit.backend.Group` for the methods.

    Args:
        backend: the backend that it belongs to.
        below: carries its messages.
        device: the rank's device.
        name: the communicator's, the same on all its ranks.
    """

    def __init__(self, backend: Backend, below: Group, device: SimulatedDevice, name: str = "main") -> None:
        self.backend, self.below, self.device = backend, below, device
        self.rank, self.world_size, self.ranks = below.rank, below.world_size, below.ranks
        self.process_group = getattr(below, "process_group", None)  # torch's, where there is one
        self._name = name
        self._communicator = f"{name} {self.ranks}"
        self._channels: dict[str, StreamsGroup] = {}

    def _later(
        self,
        operation: str,
        call: Call,
        reads: Sequence[Tensor],
        writes: Sequence[Tensor],
        async_op: bool,
        label: str,
    ) -> Work:
        """Issues a collective; what it will write has no values until then."""
        what = f"{operation} {label!r} ({self._name})"
        flight = Flight(self._communicator, what, reads, writes, places(), None)
        numel = max((t.numel() for t in (*reads, *writes)), default=0)
        work = StreamsWork(self.device, self.below, call, flight)
        self.device.issue(flight, Issued(self._communicator, operation, numel, label))
        if not async_op:
            work.wait()
        return work

    def _measure(self, operation: str, parts: Sequence[Tensor]) -> None:
        self.device.measure(f"{operation} ({self._name})", parts)

    def _now(self) -> Group:
        """The group below, after all that was issued before."""
        self.device.start()
        return self.below

    # ------------------------------------------------------------ groups
    def channels(self) -> list[StreamsGroup]:
        return list(self._channels.values())

    def channel(self, name: str) -> StreamsGroup:
        if name not in self._channels:
            with quiet():
                below = self._now().channel(name)
            self._channels[name] = StreamsGroup(self.backend, below, self.device, f"{self._name}/{name}")
        return self._channels[name]

    def new_group(self, ranks: Sequence[int]) -> StreamsGroup | None:
        with quiet():
            below = self._now().new_group(ranks)
        return None if below is None else StreamsGroup(self.backend, below, self.device, self._name)

    # ------------------------------------------------------------ tensors
    def _all_gather(self, output: Tensor, shard: Tensor, parts: Sizes, async_op: bool, label: str) -> Work:
        self._measure("all_gather_into", [shard, *torch.split_with_sizes(output.detach(), parts)])
        with quiet(), torch.no_grad():
            is_inside = output.untyped_storage()._cdata == shard.untyped_storage()._cdata
            mine = shard.clone() if is_inside else None
            spoil(output)
            if mine is not None:
                shard.copy_(mine)

        def call(below: Group) -> Work:
            return below.all_gather_into(output, shard, parts, async_op=True, label=label)

        return self._later("all_gather_into", call, [shard], [output], async_op, label)

    def _reduce_scatter(
        self, shard: Tensor, input: Tensor, parts: Sizes, op: ReduceOp, async_op: bool, label: str
    ) -> Work:
        self._measure("reduce_scatter_into", [shard, *torch.split_with_sizes(input.detach(), parts)])
        with quiet():
            spoil(shard)

        def call(below: Group) -> Work:
            return below.reduce_scatter_into(shard, input, parts, op=op, async_op=True, label=label)

        return self._later("reduce_scatter_into", call, [], [shard, input], async_op, label)

    def _all_to_all(
        self, output: Tensor, input: Tensor, come: Sizes, go: Sizes, even: bool, async_op: bool, label: str
    ) -> Work:
        with quiet():
            spoil(output)

        def call(below: Group) -> Work:
            return below.all_to_all(output, input, come, go, async_op=True, label=label)

        return self._later("all_to_all", call, [input], [output], async_op, label)

    def _all_reduce(self, tensor: Tensor, op: ReduceOp, async_op: bool, label: str) -> Work:
        self._measure("all_reduce", [tensor])

        def call(below: Group) -> Work:
            return below.all_reduce(tensor, op=op, async_op=True, label=label)

        return self._later("all_reduce", call, [], [tensor], async_op, label)

    def _reduce(self, tensor: Tensor, dst: int, op: ReduceOp, async_op: bool, label: str) -> Work:
        def call(below: Group) -> Work:
            return below.reduce(tensor, dst, op=op, async_op=True, label=label)

        return self._later(f"reduce(dst={dst})", call, [], [tensor], async_op, label)

    def _broadcast(self, tensor: Tensor, src: int, async_op: bool, label: str) -> Work:
        def call(below: Group) -> Work:
            return below.broadcast(tensor, src, async_op=True, label=label)

        read, written = ([tensor], []) if src == self.rank else ([], [tensor])
        return self._later(f"broadcast(src={src})", call, read, written, async_op, label)

    # ------------------------------------------------------------ the host waits
    def _on_host(self, what: str, call: Callable[[Group], T]) -> T:
        self.device.host_waits[what] += 1
        with quiet():
            return call(self._now())

    def barrier(self, *, label: str = "") -> None:
        self._on_host("barrier", lambda below: below.barrier(label=label))

    def all_gather_bytes(self, data: bytes, *, label: str = "") -> list[bytes]:
        return self._on_host("bytes", lambda below: below.all_gather_bytes(data, label=label))

    def all_gather_object(self, obj: T, *, label: str = "") -> list[T]:
        return self._on_host("objects", lambda below: below.all_gather_object(obj, label=label))

    def gather_object(self, obj: T, dst: int, *, label: str = "") -> list[T] | None:
        return self._on_host("objects", lambda below: below.gather_object(obj, dst, label=label))

    def broadcast_object(self, obj: T, src: int, *, label: str = "") -> T:
        return self._on_host("objects", lambda below: below.broadcast_object(obj, src, label=label))

    def agree(self, what: str) -> None:
        if self._name.endswith(ORDERED_CHANNELS):  # most are only noted
            with quiet():
                self._now().agree(what)
        else:
            self._on_host("agreement", lambda below: below.agree(what))

    def abort(self, why: str = "the rank gave up") -> None:
        self.below.abort(why)


class _WatchedMemory(Backend):
    """Memory that is taken has no values, and memory that is given back must not be in use."""

    one_order = True

    def take_storage(self, tensor: torch.Tensor) -> None:
        with quiet():
            super().take_storage(tensor)
            spoil(tensor.data)  # whose version is its own: memory has none

    def release_storage(self, tensor: torch.Tensor) -> None:
        device = current_device()
        if device is not None:
            device.release(tensor)
        with quiet():
            super().release_storage(tensor)

    def copy_down(self, out: Tensor, tensor: Tensor) -> Copy:
        device = current_device()
        return super().copy_down(out, tensor) if device is None else StreamsCopy(device, "down", out, tensor)

    def copy_up(self, out: Tensor, tensor: Tensor, *, at_once: bool = False) -> Copy:
        device = current_device()
        return super().copy_up(out, tensor) if device is None else StreamsCopy(device, "up", out, tensor)

    def synchronize(self) -> None:
        device = current_device()
        if device is not None:
            device.host_waits["synchronize"] += 1


@contextlib.contextmanager
def watched(rank: int) -> Iterator[SimulatedDevice]:
    """Within this block the calling thread's rank has a device, and all that it computes is watched."""
    device = SimulatedDevice(rank)
    set_current_device(device)
    try:
        with Watching(device):
            yield device
            device.start()
    finally:
        set_current_device(None)


class StreamsBackend(_WatchedMemory, SimulatedBackend):
    """CPU tensors, one thread a rank, under the rules of a device with streams.

    Attributes:
        devices: those of the last launch, by rank.
    """

    name = "streams"

    def __init__(self) -> None:
        self.devices: list[SimulatedDevice] = []

    def launch(
        self,
        fn: Callable[..., T],
        world_size: int,
        args: Args = (),
        *,
        timeout: float | None = None,
        start_timeout: float | None = None,
    ) -> list[T]:
        """Runs ``fn(rank, *args)`` on that many threads.

        Raises:
            RankFailedError: a rank failed; with RaceError: two accesses to the same memory that nothing orders.
            OutOfStepError: ranks issue collectives of several communicators in different orders, where NCCL may hang.
        """
        self.devices = []

        def on_device(rank: int, *passed: object) -> T:
            with watched(rank) as device:
                below = self.group()
                enter_group(StreamsGroup(self, below, device))
                self.devices.append(device)
                return fn(rank, *passed)

        results = super().launch(on_device, world_size, args, timeout=timeout)
        self.devices.sort(key=lambda device: device.rank)
        check_order([device.issued for device in self.devices])
        return results


class StreamsOverGloo(_WatchedMemory, GlooBackend):
    """CPU tensors, one process a rank, under the rules of a device with streams within :func:`watched`."""

    name = "gloo"

    def __init__(self) -> None:
        super().__init__()
        self._watched: dict[int, StreamsGroup] = {}  # by id of the group below

    def group(self, process_group: ProcessGroup = None) -> StreamsGroup:  # type: ignore[override]
        if isinstance(process_group, StreamsGroup):
            return process_group
        below = super().group(process_group)
        known, device = (
            self._watched.get(id(below)),
            current_device() or SimulatedDevice(below.ranks[below.rank]),
        )
        if known is None or known.below is not below or known.device is not device:
            known = self._watched[id(below)] = StreamsGroup(self, below, device)
        return known


def check_order(issued: Sequence[Sequence[Issued]]) -> None:
    """Any two ranks issue the collectives of all communicators that both are in in the same order.

    Args:
        issued: what each rank has issued.
    """
    for one, other in combinations(range(len(issued)), 2):
        both = {call.communicator for call in issued[one]} & {call.communicator for call in issued[other]}
        mine, theirs = ([call for call in issued[rank] if call.communicator in both] for rank in (one, other))
        for k, (a, b) in enumerate(zip(mine, theirs, strict=False)):
            if (a.communicator, a.operation) != (b.communicator, b.operation):
                raise OutOfStepError(
                    f"communicators are used in different orders: collective {k} is {a} on rank {one} and "
                    f"{b} on rank {other}. Issue collectives of different groups and channels in one order on "
                    "all ranks"
                )
