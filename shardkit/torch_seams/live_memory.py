"""Bytes of live tensors, for devices whose allocator keeps no count (the CPU)."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence

import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from ..types import Args, Kwargs, Tree


class LiveTensors(TorchDispatchMode):
    """Counts the bytes of storages from when an operation returns them until nobody refers to them any more.

    Attributes:
        peak: most that were alive at a time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.peak = 0
        self._sizes: dict[int, int] = {}  # by storage
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: Args = (),
        kwargs: Kwargs | None = None,
    ) -> Tree:
        returned = func(*args, **(kwargs or {}))
        self.add(returned)
        return returned

    def add(self, tensors: object) -> None:
        """Counts tensors in any nesting of containers."""
        for tensor in tree_leaves(tensors):
            if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided:
                self.count(tensor.untyped_storage())

    def count(self, storage: torch.UntypedStorage) -> None:
        """Counts a storage from now on; its size may have changed."""
        key, size = storage._cdata, storage.nbytes()
        if key not in self._alive:
            self._alive[key] = weakref.ref(storage, lambda _: self._forget(key))
        self.bytes += size - self._sizes.get(key, 0)
        self._sizes[key] = size
        self.grown()

    def grown(self) -> None:
        """Notes that more may be alive than ever."""
        self.peak = max(self.peak, self.bytes)

    def _forget(self, key: int) -> None:
        self._alive.pop(key, None)
        self.bytes -= self._sizes.pop(key, 0)


def parts_with_memory(tensor: Tree) -> Iterator[torch.Tensor]:
    """Yields the tensors with memory that one of a wrapping class (a DTensor) is made of; else itself."""
    if type(tensor) is torch.Tensor or not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    for part in [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]:
        if isinstance(part, torch.Tensor):
            yield from parts_with_memory(part)
