"""A backend of as many ranks as one likes, of which only rank 0 exists: collectives carry nothing and are counted.

Tensors are on the meta device: they have shapes and no values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from shardkit.backend import ReduceOp
from shardkit.backends.host import Host


class Done:
    """A collective that is through."""

    def wait(self) -> None:
        return

    def is_done(self) -> bool:
        return True


class CountingGroup:
    """Rank 0 of a group whose other ranks are imagined.

    Attributes:
        collectives: name -> number since :meth:`reset`.
        sent: bytes that a rank has to send for them, averaged over ranks.
    """

    rank = 0

    def __init__(self, backend: CountingBackend, world_size: int) -> None:
        self.backend = backend
        self.world_size = world_size
        self.ranks = tuple(range(world_size))
        self.reset()

    def reset(self) -> None:
        """Starts counting anew."""
        self.collectives: Counter[str] = Counter()
        self.sent = 0.0

    def _count(self, name: str, tensor: torch.Tensor) -> Done:
        self.collectives[name] += 1
        self.sent += tensor.numel() * tensor.element_size() * (self.world_size - 1) / self.world_size
        return Done()

    def channel(self, name: str) -> CountingGroup:
        return self

    def all_gather_into(
        self, output: torch.Tensor, shard: torch.Tensor, sizes: Sequence[int] | None = None, *,
        async_op: bool = False, label: str = "",
    ) -> Done:  # fmt: skip
        return self._count("all_gather", output)

    def reduce_scatter_into(
        self, shard: torch.Tensor, input: torch.Tensor, sizes: Sequence[int] | None = None, *,
        op: ReduceOp = ReduceOp.SUM, async_op: bool = False, label: str = "",
    ) -> Done:  # fmt: skip
        return self._count("reduce_scatter", input)

    def broadcast(self, tensor: torch.Tensor, src: int, *, async_op: bool = False, label: str = "") -> Done:
        return self._count("broadcast", tensor)

    def all_gather_bytes(self, data: bytes, *, label: str = "") -> list[bytes]:
        return [data] * self.world_size

    def all_gather_object(self, obj: Any, *, label: str = "") -> list[Any]:
        return [obj] * self.world_size


class CountingBackend(Host):
    """Serves meta tensors."""

    name = "counting"
    device_type = "meta"

    def __init__(self, world_size: int) -> None:
        self._group = CountingGroup(self, world_size)

    def device(self) -> torch.device:
        return torch.device("meta")

    def group(self, process_group: Any = None) -> CountingGroup:
        return self._group
