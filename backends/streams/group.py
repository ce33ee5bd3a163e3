"""Groups whose collectives run on streams: any other backend's group below, which is called as late as possible."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shardkit.backend import Backend, Group, ReduceOp, Work
from shardkit.types import T

from ..c10d.call_order import ORDERED_CHANNELS
from ..checked_group import CheckedGroup
from ..simulated.collectives import spoil
from .device import Device, Flight, Issued, places, quiet

Call = Callable[[Group], Work]


class StreamsWork(Work):
    """A collective that the current stream may have to wait for."""

    __slots__ = ("_below", "_call", "_device", "_flight", "_group")

    def __init__(self, device: Device, group: Group, call: Call, flight: Flight) -> None:
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


class StreamsGroup(CheckedGroup):
    """A communicator of a simulated device; see :class:`shardkit.backend.Group` for the methods.

    Args:
        backend: the backend that it belongs to.
        below: carries its messages.
        device: the rank's device.
        name: the communicator's, the same on all its ranks.
    """

    def __init__(self, backend: Backend, below: Group, device: Device, name: str = "main") -> None:
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
    def _all_gather(
        self, output: Tensor, shard: Tensor, parts: list[int], async_op: bool, label: str
    ) -> Work:
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
        self, shard: Tensor, input: Tensor, parts: list[int], op: ReduceOp, async_op: bool, label: str
    ) -> Work:
        self._measure("reduce_scatter_into", [shard, *torch.split_with_sizes(input.detach(), parts)])
        with quiet():
            spoil(shard)

        def call(below: Group) -> Work:
            return below.reduce_scatter_into(shard, input, parts, op=op, async_op=True, label=label)

        return self._later("reduce_scatter_into", call, [], [shard, input], async_op, label)

    def _all_to_all(
        self,
        output: Tensor,
        input: Tensor,
        come: list[int],
        go: list[int],
        even: bool,
        async_op: bool,
        label: str,
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
