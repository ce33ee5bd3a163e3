"""How many bytes a rank has in tensors."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from shardkit.backends.simulated.rank_threads import RankThreads
from shardkit.torch_seams.live_memory import LiveTensors
from shardkit.types import Tree

from .ranks import Rank, current

_active: dict[int, RankMemory] = {}  # by rank


class RankMemory(LiveTensors):
    """Counts the bytes of the storages that a rank's operations make, for as long as they live.

    Args:
        threads: what they do for all ranks together does not count.
    """

    def __init__(self, rank: Rank, threads: RankThreads) -> None:
        super().__init__()
        self._rank, self._threads = rank, threads

    def __enter__(self) -> Tree:
        _active[self._rank.number] = self
        return super().__enter__()

    def __exit__(self, *error: Tree) -> None:
        _active.pop(self._rank.number, None)
        super().__exit__(*error)

    def add(self, tensors: object) -> None:
        if not self._threads.is_finishing:
            super().add([_plain(t) for t in tree_leaves(tensors) if isinstance(t, torch.Tensor)])

    def grown(self) -> None:
        self._rank.seen.peak = max(self._rank.seen.peak, self.bytes)


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


def _plain(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors with memory that one of a wrapping class (a DTensor) is made of; else itself."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) and is_traceable_wrapper_subclass(tensor):
        parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
        return [t for part in parts if isinstance(part, torch.Tensor) for t in _plain(part)]
    return [] if tensor.is_meta else [tensor]
