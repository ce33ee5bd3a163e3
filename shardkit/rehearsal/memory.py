"""How many bytes a rank has in tensors."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator

import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from shardkit.backends.simulated.rank_threads import RankThreads
from shardkit.types import Args, Kwargs, Tree

from .ranks import Rank, current

_active: dict[int, RankMemory] = {}  # by rank


class RankMemory(TorchDispatchMode):
    """Counts the bytes of the storages that a rank's operations make, for as long as they live.

    Args:
        threads: what they do for all ranks together does not count.
    """

    def __init__(self, rank: Rank, threads: RankThreads) -> None:
        super().__init__()
        self._rank, self._threads, self._bytes = rank, threads, 0
        self._sizes: dict[int, int] = {}  # by storage
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __enter__(self) -> Tree:
        _active[self._rank.number] = self
        return super().__enter__()

    def __exit__(self, *error: Tree) -> None:
        _active.pop(self._rank.number, None)
        super().__exit__(*error)

    def count(self, storage: torch.UntypedStorage) -> None:
        """From now on; its size may have changed."""
        key, size = storage._cdata, storage.nbytes()
        if key not in self._alive:
            self._alive[key] = weakref.ref(storage, lambda _: self._forget(key))
        self._bytes += size - self._sizes.get(key, 0)
        self._sizes[key] = size
        self._rank.seen.peak = max(self._rank.seen.peak, self._bytes)

    def _forget(self, key: int) -> None:
        self._alive.pop(key, None)
        self._bytes -= self._sizes.pop(key, 0)

    def __torch_dispatch__(
        self, func: Callable[..., Tree], types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> Tree:
        result = func(*args, **(kwargs or {}))
        if self._threads.is_finishing:
            return result
        for leaf in (result,) if isinstance(result, torch.Tensor) else tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                for tensor in _plain(leaf):
                    self.count(tensor.untyped_storage())
        return result


def resizing(resize: Callable[..., Tree]) -> Callable[..., Tree]:
    """``UntypedStorage.resize_``, by which sharded models take and give back memory: no operation tells of it."""

    def resize_(storage: torch.UntypedStorage, size: int) -> Tree:
        result = resize(storage, size)
        rank = current()
        counting = None if rank is None else _active.get(rank.number)
        if counting is not None:
            counting.count(storage)
        return result

    return resize_


def _plain(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors with memory that one of a wrapping class (a DTensor) is made of; else itself."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) and is_traceable_wrapper_subclass(tensor):
        for part in [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]:
            if isinstance(part, torch.Tensor):
                yield from _plain(part)
    elif tensor.layout is torch.strided and tensor.device.type != "meta":
        yield tensor
