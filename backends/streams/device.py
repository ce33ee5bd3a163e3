"""What a rank's device knows: which collectives its streams still run, and which memory those read and write.

[Note: clocks] Every communicator has a stream of its own. A collective comes after all that its stream and the current
one have been given before; what the current stream is given later comes after the collective only when its work, or a
later one of the same communicator, was waited for. All computation is issued on one stream. So the vector clocks of all
streams come down to one queue for each communicator: the collectives that nothing orders before what is computed next.
An access to memory of one of them is a race, if one of the two writes. Giving memory back counts as a write: the
allocator hands it to whoever asks next on the current stream.
"""

from __future__ import annotations

import dataclasses
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

from shardkit.errors import RaceError

ALIGNED = 16  # bytes; what copies of NCCL and kernels take in one piece
_PLACES = 4  # frames that a report shows
_OWN = ("/backends/streams/", "/torch/", "/contextlib.py", "/functools.py")


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
        what: operation and label.
        reads: memory that it reads.
        writes: memory that it writes.
        places: where it was issued.
        start: hands it to the ranks below; None: done.
    """

    communicator: str
    what: str
    reads: Sequence[torch.Tensor]
    writes: Sequence[torch.Tensor]
    places: str
    start: Callable[[], None] | None

    def touching(self, begin: int, end: int, storage: int, writes: bool) -> str:
        """What it does with these bytes of a storage, if that must not happen beside the other access."""
        for does, tensors in (("writes", self.writes), ("reads", self.reads if writes else ())):
            for tensor in tensors:
                if tensor.untyped_storage()._cdata == storage:
                    first, last = bytes_of(tensor)
                    if first < end and begin < last:
                        return does
        return ""


class Device:
    """One rank's device.

    Args:
        rank: global rank.

    Attributes:
        issued: all collectives in order.
        misaligned: how many parts of collectives' buffers began at no multiple of 16 bytes, by what they were.
        most_in_flight: the most bytes that collectives in flight wrote at once.
        host_waits: how often the host waited for the device, by what for.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.issued: list[Issued] = []
        self.misaligned: Counter[str] = Counter()
        self.host_waits: Counter[str] = Counter()
        self.most_in_flight = 0
        self._flights: dict[str, deque[Flight]] = {}  # by communicator
        self._late: deque[Flight] = deque()  # not started yet, in order
        self._storages: Counter[int] = Counter()  # how many flights use each

    # ------------------------------------------------------------ collectives
    def issue(self, flight: Flight, key: Issued) -> None:
        """A collective was given to its communicator's stream; it starts as late as possible.

        Raises:
            RaceError: one of another communicator uses the same memory.
        """
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

    def wait(self, flight: Flight) -> None:
        """What is computed from now on comes after this collective, and all earlier ones of its communicator."""
        flights = self._flights[flight.communicator]
        while flight in flights:
            self._storages.subtract(_storages(flights.popleft()))

    def unwaited(self) -> list[str]:
        """Collectives that nobody has waited for."""
        return [f.what for f in self._in_flight()]

    def _in_flight(self) -> Iterable[Flight]:
        return (f for flights in self._flights.values() for f in flights)

    # ------------------------------------------------------------ memory
    def access(self, tensor: torch.Tensor, writes: bool, what: str) -> None:
        """The current stream reads or writes a tensor.

        Raises:
            RaceError: a collective does so at the same time, or its memory was given back.
        """
        if tensor.layout is not torch.strided or tensor.is_meta or not tensor.numel():
            return
        storage = tensor.untyped_storage()
        if not storage.nbytes():
            raise RaceError(f"rank {self.rank}: {what} touches memory that was given back, at {places()}")
        self._check(tensor, writes, what, None)

    def release(self, tensor: torch.Tensor) -> None:
        """A tensor's whole memory is given back.

        Raises:
            RaceError: a collective still uses it.
        """
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
    """What runs in this block is the device's own doing, which it does not watch."""

    __slots__ = ("_guard",)

    def __enter__(self) -> None:
        self._guard = torch._C._DisableTorchDispatch()  # type: ignore[attr-defined]

    def __exit__(self, *_: object) -> None:
        del self._guard


class _Here(threading.local):
    device: Device | None = None


_here = _Here()


def current_device() -> Device | None:
    """The device of the rank that calls, if there is one."""
    return _here.device


def set_current_device(device: Device | None) -> None:
    _here.device = device
