"""A backend of as many ranks as one likes, of which only rank 0 exists: collectives carry nothing and are counted.

Tensors are on the meta device: they have shapes and no values.
"""

from __future__ import annotations

from collections import Counter

import torch

from shardkit.backend import Work
from shardkit.backends.imagined import ImaginedBackend, ImaginedGroup


class CountingGroup(ImaginedGroup):
    """Rank 0 of a group whose other ranks are imagined.

    Attributes:
        collectives: name -> number since :meth:`reset`.
        sent: bytes that a rank has to send for them, averaged over ranks.
    """

    def __init__(self, backend: CountingBackend, world_size: int) -> None:
        super().__init__(backend, range(world_size))
        self.reset()

    def reset(self) -> None:
        """Starts counting anew."""
        self.collectives: Counter[str] = Counter()
        self.sent = 0.0

    def _carry(self, operation: str, tensor: torch.Tensor) -> Work:
        self.collectives[operation] += 1
        self.sent += tensor.numel() * tensor.element_size() * (self.world_size - 1) / self.world_size
        return super()._carry(operation, tensor)


class CountingBackend(ImaginedBackend):
    """Serves meta tensors."""

    name = "counting"

    def __init__(self, world_size: int) -> None:
        self._group = CountingGroup(self, world_size)
