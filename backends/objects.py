"""Python objects between ranks: through collectives of bytes, or where ranks exchange bytes on the host."""

from __future__ import annotations

import abc
import pickle
from collections.abc import Sequence

import torch

from shardkit.backend import Group, check_member
from shardkit.errors import ConfigurationError
from shardkit.types import T


class ObjectsOverTensors(Group):
    """Carries objects by the group's own collectives.

    The bytes are received into a bytearray that pickle reads in place, so neither numpy nor a copy is needed.
    """

    process_group: object  # None: a single rank that never communicates

    def all_gather_object(self, obj: T, *, label: str = "") -> list[T]:
        if self.process_group is None:
            return [obj]
        return [pickle.loads(part) for part in self._gathered(*announce(self, obj, True, label), label)]

    def all_gather_bytes(self, data: bytes, *, label: str = "") -> list[bytes]:
        if self.process_group is None:
            return [data]
        sizes = sizes_of(self, len(data), label)
        return [bytes(part) for part in self._gathered(bytearray(data), sizes, label)]

    def gather_object(self, obj: T, dst: int, *, label: str = "") -> list[T] | None:
        check_member(self, "gather_object", dst)
        if self.process_group is None:
            return [obj]
        packed, sizes = announce(self, obj, True, label)
        data = as_tensor(packed).to(self.backend.device())
        here, world = self.rank == dst, self.world_size
        buffer, everything = _buffer(self, sum(sizes) if here else 0)
        send = [data.numel() if r == dst else 0 for r in range(world)]
        self.all_to_all(everything, data, sizes if here else [0] * world, send, label=label)
        return [pickle.loads(part) for part in _parts(buffer, everything, sizes)] if here else None

    def broadcast_object(self, obj: T, src: int, *, label: str = "") -> T:
        check_member(self, "broadcast_object", src)
        if self.process_group is None:
            return obj
        here = self.rank == src
        data, sizes = announce(self, obj, here, label)
        received = self._spread(data, sizes[src], src, label)
        return obj if here else pickle.loads(received)

    def _widths(self, sizes: Sequence[int]) -> Sequence[int]:
        """Returns how many bytes travel for objects of these sizes."""
        return sizes

    def _gathered(self, data: bytearray, sizes: Sequence[int], label: str) -> list[memoryview]:
        widths = self._widths(sizes)
        own = as_tensor(data.ljust(widths[self.rank], b"\0")).to(self.backend.device())
        buffer, everything = _buffer(self, sum(widths))
        self.all_gather_into(everything, own, widths, label=label)
        parts = _parts(buffer, everything, widths)
        return [part[:size] for part, size in zip(parts, sizes, strict=True)]

    def _spread(self, data: bytearray, size: int, src: int, label: str) -> memoryview:
        (width,) = self._widths([size])
        if self.rank == src:
            self.broadcast(as_tensor(data.ljust(width, b"\0")).to(self.backend.device()), src, label=label)
            return memoryview(data)
        buffer, received = _buffer(self, width)
        self.broadcast(received, src, label=label)
        return _parts(buffer, received, [size])[0]


def announce(group: Group, obj: object, sends: bool, label: str) -> tuple[bytearray, list[int]]:
    """Returns the pickled object, and the number of bytes on every rank."""
    problem: Exception | None = None
    data = bytearray()
    if sends:
        try:
            data = bytearray(pickle.dumps(obj))
        except Exception as error:  # noqa: BLE001 - whatever __reduce__ of the user's object raises
            problem = error
    counts = sizes_of(group, len(data) if problem is None else -1, label)
    if min(counts) < 0:
        ranks = [group.ranks[r] for r, count in enumerate(counts) if count < 0]
        what = f" ({type(obj).__name__} here: {problem})" if problem is not None else ""
        raise ConfigurationError(
            f"objects of ranks {ranks} can't be pickled{what}; label {label!r}"
        ) from problem
    return data, counts


def sizes_of(group: Group, size: int, label: str) -> list[int]:
    sizes = torch.zeros(group.world_size, dtype=torch.int64, device=group.backend.device())
    own = sizes[group.rank : group.rank + 1]
    own.fill_(size)
    group.all_gather_into(sizes, own, label=label)
    counts: list[int] = sizes.tolist()
    return counts


def as_tensor(data: bytearray) -> torch.Tensor:
    return torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _buffer(group: Group, numel: int) -> tuple[bytearray, torch.Tensor]:
    buffer = bytearray(numel)
    if not numel:
        return buffer, torch.empty(0, dtype=torch.uint8, device=group.backend.device())
    tensor = torch.frombuffer(buffer, dtype=torch.uint8)
    device = group.backend.device()
    return buffer, tensor if device.type == "cpu" else torch.empty_like(tensor, device=device)


def _parts(buffer: bytearray, received: torch.Tensor, sizes: Sequence[int]) -> list[memoryview]:
    if received.device.type != "cpu":
        torch.frombuffer(buffer, dtype=torch.uint8).copy_(received)
    view, start, parts = memoryview(buffer), 0, []
    for size in sizes:
        parts.append(view[start : start + size])
        start += size
    return parts


class ObjectsOverBytes(Group):
    """Exchanges objects as pickled bytes, so that ranks of one process share nothing."""

    @abc.abstractmethod
    def _exchange(self, what: str, label: str, data: bytes) -> list[bytes]:
        """Returns each rank's bytes, in group order; ``what`` has to be equal on all ranks."""

    def _pack(self, obj: object) -> bytes:
        return pickle.dumps(obj)

    def all_gather_bytes(self, data: bytes, *, label: str = "") -> list[bytes]:
        return list(self._exchange("all_gather_bytes", label, bytes(data)))

    def all_gather_object(self, obj: T, *, label: str = "") -> list[T]:
        return [pickle.loads(data) for data in self._exchange("all_gather_object", label, self._pack(obj))]

    def gather_object(self, obj: T, dst: int, *, label: str = "") -> list[T] | None:
        check_member(self, "gather_object", dst)
        everything = self._exchange(f"gather_object(dst={dst})", label, self._pack(obj))
        return [pickle.loads(data) for data in everything] if self.rank == dst else None

    def broadcast_object(self, obj: T, src: int, *, label: str = "") -> T:
        check_member(self, "broadcast_object", src)
        data = self._pack(obj) if self.rank == src else b""
        return pickle.loads(self._exchange(f"broadcast_object(src={src})", label, data)[src])
