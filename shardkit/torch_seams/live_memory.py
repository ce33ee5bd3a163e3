"""Bytes of live tensors, for devices whose allocator keeps no count (the CPU)."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..types import AnyCallable, Args, Kwargs, Tree


class LiveTensors(TorchDispatchMode):
    """Counts the bytes of storages from when an operation returns them until nobody refers to them any more.

    Attributes:
        bytes: alive now.
        peak: most that were alive at a time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: AnyCallable, types: Sequence[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> Tree:
        returned = func(*args, **(kwargs or {}))
        self.add(returned)
        return returned

    def add(self, tensors: object) -> None:
        """Tensors in any nesting of containers."""
        for storage in (t.untyped_storage() for t in tree_leaves(tensors) if isinstance(t, torch.Tensor)):
            if storage._cdata not in self._known:
                self._known.add(storage._cdata)
                self.bytes += storage.nbytes()
                self.peak = max(self.peak, self.bytes)
                weakref.finalize(storage, self._forget, storage._cdata, storage.nbytes())

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.bytes -= size
