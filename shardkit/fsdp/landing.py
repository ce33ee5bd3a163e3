"""Gradients on their way from the device to a shard on the host.

Legend: S shard numel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from ..backend import Backend, Copy

_holders_of = torch._C._storage_Use_Count  # how many tensors look at a storage


class Arriving(NamedTuple):
    """A gradient on its way to the host."""

    memory: torch.Tensor  # [S], in the dtype in which it has travelled
    work: Copy
    landing: Landing

    def finish(self) -> torch.Tensor:
        """Waits; returns it in the shard's dtype, [S]."""
        self.work.wait_on_host()
        return self.landing.cast(self.memory)


class Landing:
    """Brings gradients of one shard to the host.

    Attributes:
        is_idle: a gradient has come since the copy was read: the device, too, is through with it.
        then: called when a backward has brought its gradient.
    """

    def __init__(self, backend: Backend, size: int, dtype: torch.dtype) -> None:
        self._backend, self._size, self._dtype = backend, size, dtype
        self._memory: dict[torch.dtype, torch.Tensor] = {}  # pinned
        self.is_idle = False
        self.then: Callable[[], None] | None = None

    def start(self, gradient: torch.Tensor) -> Arriving:
        """Copies a gradient of the device, [S], beside what is computed."""
        memory = self._unused(gradient.dtype)
        return Arriving(memory, self._backend.copy_down(memory, gradient), self)

    def landed(self, waited: bool) -> None:
        """Notes that the shard has its gradient; whether the host has ``waited`` for it."""
        self.is_idle = self.is_idle or waited
        if self.then is not None:
            self.then()

    def cast(self, gradient: torch.Tensor) -> torch.Tensor:
        """Returns what has arrived, in the shard's dtype."""
        return gradient if gradient.dtype == self._dtype else self._unused(self._dtype).copy_(gradient)

    def _unused(self, dtype: torch.dtype) -> torch.Tensor:
        """Memory [S] that nobody else looks at: that of the last step, unless its gradients are still there."""
        kept = self._memory.get(dtype)
        if kept is None or _holders_of(kept.untyped_storage()._cdata) > _ALONE:
            kept = self._memory[dtype] = self._backend.pinned(self._size, dtype)
        return kept.view(-1)


def _holders_of_one() -> int:
    one = torch.empty(1)
    return _holders_of(one.untyped_storage()._cdata)


_ALONE = _holders_of_one()
