"""How many bytes are in tensors after each operation, by what they are for."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..types import Args, Kwargs, Tree
from .tape import Tape

KINDS = ("parameters", "gathered", "gradients", "optimizer state", "activations")
Kinds = Mapping[str, Iterable[torch.Tensor]]


class MemoryWatch(TorchDispatchMode):
    """Counts the bytes of all storages that operations inside of it use, for as long as they live.

    Args:
        kinds: tells which tensors are of which kind, but activations, which is everything else.
        moments: after which operations to look at the kinds, in order.
        tape: records the operations.

    Attributes:
        operations: how many there were.
        bytes: in tensors now.
        peak: most so far.
        peak_at: the number of the operation after which that was.
        seen: what :attr:`moments` showed: bytes by kind.
    """

    def __init__(
        self, kinds: Callable[[], Kinds], moments: Iterable[int] = (), tape: Tape | None = None
    ) -> None:
        super().__init__()
        self._tape = tape
        self._kinds, self._moments = kinds, iter(moments)
        self._next = next(self._moments, -1)
        self._sizes: dict[int, int] = {}  # by storage
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.operations = self.bytes = self.peak = 0
        self.peak_at = -1
        self.seen: list[dict[str, int]] = []

    def watch(self, tensor: torch.Tensor) -> None:
        """Counts a tensor from now on; its size may have changed."""
        if tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self._alive:
            self._alive[key] = weakref.ref(storage, lambda _: self._forget(key))
        self.bytes += size - self._sizes.get(key, 0)
        self._sizes[key] = size

    def _forget(self, key: int) -> None:
        self._alive.pop(key, None)
        self.bytes -= self._sizes.pop(key, 0)

    def __torch_dispatch__(
        self, func: torch._ops.OpOverload, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> Tree:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.watch(tensor)
        if self._tape is not None:
            self._tape.operation(func, args, kwargs or {}, result)
        if self.bytes > self.peak:
            self.peak, self.peak_at = self.bytes, self.operations
        if self.operations == self._next:
            self._next = next(self._moments, -1)
            self.seen.append(self.by_kind())
        self.operations += 1
        return result

    def by_kind(self) -> dict[str, int]:
        """Bytes now."""
        found, counted = dict.fromkeys(KINDS, 0), set()
        for kind, tensors in self._kinds().items():
            for tensor in tensors:
                key = tensor.untyped_storage()._cdata
                if key in self._sizes and key not in counted:
                    counted.add(key)
                    found[kind] += self._sizes[key]
        found["activations"] = self.bytes - sum(found.values())
        return found
