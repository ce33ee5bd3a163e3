"""Python objects between ranks that exchange bytes on the host."""

from __future__ import annotations

import abc
import pickle

from shardkit.backend import Group
from shardkit.types import T

from .arguments import check_member


class ObjectsOverBytes(Group):
    """Object collectives of such a group; objects are pickled, so that ranks of one process share nothing."""

    @abc.abstractmethod
    def _exchange(self, what: str, label: str, data: bytes) -> list[bytes]:
        """Each rank's bytes, in group order; ``what`` has to be equal on all ranks."""

    def _pack(self, obj: object) -> bytes:
        return pickle.dumps(obj)

    def all_gather_bytes(self, data: bytes, *, label: str = "") -> list[bytes]:
        return list(self._exchange("all_gather_bytes", label, bytes(data)))

    def all_gather_object(self, obj: T, *, label: str = "") -> list[T]:
        return [pickle.loads(data) for data in self._exchange("all_gather_object", label, self._pack(obj))]

    def gather_object(self, obj: T, dst: int, *, label: str = "") -> list[T] | None:
        check_member("gather_object", self.rank, self.world_size, dst)
        everything = self._exchange(f"gather_object(dst={dst})", label, self._pack(obj))
        return [pickle.loads(data) for data in everything] if self.rank == dst else None

    def broadcast_object(self, obj: T, src: int, *, label: str = "") -> T:
        check_member("broadcast_object", self.rank, self.world_size, src)
        data = self._pack(obj) if self.rank == src else b""
        return pickle.loads(self._exchange(f"broadcast_object(src={src})", label, data)[src])
