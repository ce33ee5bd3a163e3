"""Backends whose ranks have a simulated device each: over simulated ranks (threads), and over gloo (processes)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations

import torch

from shardkit.errors import OutOfStepError
from shardkit.types import Args, ProcessGroup, T

from ..eager import EagerBackend
from ..gloo import GlooBackend
from ..simulated.backend import SimulatedBackend, enter_group
from ..simulated.collectives import spoil
from .device import Device, Issued, current_device, quiet, set_current_device
from .group import StreamsGroup
from .watching import Watching


class _WatchedMemory(EagerBackend):
    """Memory that is taken has no values, and memory that is given back must not be in use."""

    one_order = True

    def take_storage(self, tensor: torch.Tensor) -> None:
        with quiet():
            super().take_storage(tensor)
            spoil(tensor.detach())

    def release_storage(self, tensor: torch.Tensor) -> None:
        device = current_device()
        if device is not None:
            device.release(tensor)
        with quiet():
            super().release_storage(tensor)

    def synchronize(self) -> None:
        device = current_device()
        if device is not None:
            device.host_waits["synchronize"] += 1


@contextlib.contextmanager
def watched(rank: int) -> Iterator[Device]:
    """Within this block the calling thread's rank has a device, and all that it computes is watched."""
    device = Device(rank)
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
        self.devices: list[Device] = []

    def launch(
        self, fn: Callable[..., T], world_size: int, args: Args = (), *, timeout: float | None = None,
        start_timeout: float | None = None,
    ) -> list[T]:  # fmt: skip
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
        known, device = self._watched.get(id(below)), current_device() or Device(below.ranks[below.rank])
        if known is None or known.below is not below or known.device is not device:
            known = self._watched[id(below)] = StreamsGroup(self, below, device)
        return known


def check_order(issued: Sequence[Sequence[Issued]]) -> None:
    """Any two ranks issue the collectives of all communicators that both are in in the same order.

    Args:
        issued: what each rank has issued.

    Raises:
        OutOfStepError: they don't: NCCL may run them in any order and wait for ever.
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
