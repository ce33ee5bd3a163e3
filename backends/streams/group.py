"""Groups whose collectives run on streams: any other backend's group below, which is called as late as possible."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from shardkit.backend import Backend, Group, ReduceOp, Work
from shardkit.types import T

from ..arguments import check_exchange, check_member, check_op, check_parts
from ..c10d.call_order import ORDERED_CHANNELS
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


class StreamsGroup(Group):
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
        self, operation: str, call: Call, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor],
        async_op: bool, label: str,
    ) -> Work:  # fmt: skip
        """Issues a collective; what it will write has no values until then."""
        what = f"{operation} {label!r} ({self._name})"
        flight = Flight(self._communicator, what, reads, writes, places(), None)
        numel = max((t.numel() for t in (*reads, *writes)), default=0)
        work = StreamsWork(self.device, self.below, call, flight)
        self.device.issue(flight, Issued(self._communicator, operation, numel, label))
        if not async_op:
            work.wait()
        return work

    def _measure(self, operation: str, parts: Sequence[torch.Tensor]) -> None:
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
    def all_gather_into(
        self, output: torch.Tensor, shard: torch.Tensor, sizes: Sequence[int] | None = None, *,
        async_op: bool = False, label: str = "",
    ) -> Work:  # fmt: skip
        """[S] -> [N]"""
        counts = check_parts("all_gather_into", self.rank, self.world_size, output, shard, sizes)
        self._measure("all_gather_into", [shard, *torch.split_with_sizes(output.detach(), counts)])
        with quiet(), torch.no_grad():
            is_inside = output.untyped_storage()._cdata == shard.untyped_storage()._cdata
            mine = shard.clone() if is_inside else None
            spoil(output)
            if mine is not None:
                shard.copy_(mine)
        return self._later(
            "all_gather_into",
            lambda below: below.all_gather_into(output, shard, sizes, async_op=True, label=label),
            [shard], [output], async_op, label,
        )  # fmt: skip

    def reduce_scatter_into(
        self, shard: torch.Tensor, input: torch.Tensor, sizes: Sequence[int] | None = None, *,
        op: ReduceOp = ReduceOp.SUM, async_op: bool = False, label: str = "",
    ) -> Work:  # fmt: skip
        """[N] -> [S]"""
        counts = check_parts("reduce_scatter_into", self.rank, self.world_size, input, shard, sizes)
        self._measure("reduce_scatter_into", [shard, *torch.split_with_sizes(input.detach(), counts)])
        check_op("reduce_scatter_into", self.rank, op, input.dtype)
        with quiet():
            spoil(shard)
        return self._later(
            "reduce_scatter_into",
            lambda below: below.reduce_scatter_into(shard, input, sizes, op=op, async_op=True, label=label),
            [], [shard, input], async_op, label,
        )  # fmt: skip

    def all_to_all(
        self, output: torch.Tensor, input: torch.Tensor, output_sizes: Sequence[int] | None = None,
        input_sizes: Sequence[int] | None = None, *, async_op: bool = False, label: str = "",
    ) -> Work:  # fmt: skip
        """[sum(input_sizes)] -> [sum(output_sizes)]"""
        check_exchange("all_to_all", self.rank, self.world_size, output, input, output_sizes, input_sizes)
        with quiet():
            spoil(output)
        return self._later(
            "all_to_all",
            lambda below: below.all_to_all(output, input, output_sizes, input_sizes, async_op=True, label=label),
            [input], [output], async_op, label,
        )  # fmt: skip

    def all_reduce(
        self, tensor: torch.Tensor, *, op: ReduceOp = ReduceOp.SUM, async_op: bool = False, label: str = ""
    ) -> Work:
        """In place, any shape."""
        check_op("all_reduce", self.rank, op, tensor.dtype)
        self._measure("all_reduce", [tensor])
        return self._later(
            "all_reduce",
            lambda below: below.all_reduce(tensor, op=op, async_op=True, label=label),
            [], [tensor], async_op, label,
        )  # fmt: skip

    def reduce(
        self, tensor: torch.Tensor, dst: int, *, op: ReduceOp = ReduceOp.SUM, async_op: bool = False, label: str = ""
    ) -> Work:  # fmt: skip
        """In place on ``dst``."""
        check_member("reduce", self.rank, self.world_size, dst)
        check_op("reduce", self.rank, op, tensor.dtype)
        return self._later(
            f"reduce(dst={dst})",
            lambda below: below.reduce(tensor, dst, op=op, async_op=True, label=label),
            [], [tensor], async_op, label,
        )  # fmt: skip

    def broadcast(self, tensor: torch.Tensor, src: int, *, async_op: bool = False, label: str = "") -> Work:
        """In place, any shape."""
        check_member("broadcast", self.rank, self.world_size, src)
        is_source = src == self.rank
        return self._later(
            f"broadcast(src={src})",
            lambda below: below.broadcast(tensor, src, async_op=True, label=label),
            [tensor] if is_source else [], [] if is_source else [tensor], async_op, label,
        )  # fmt: skip

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
