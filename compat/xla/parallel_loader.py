"""torch_xla.distributed.parallel_loader: batches on the rank's device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Generic

import torch
from torch.utils._pytree import tree_map_only

from shardkit.backends.xla import has_accelerator
from shardkit.types import T, Tree
from shardkit.xla.ranks import current_backend


class MpDeviceLoader(Generic[T]):
    """Iterates over a loader's batches with their tensors on the device, and ends a step before each batch.

    With an accelerator this is torch_xla's, which loads ahead in threads of its own. Elsewhere batches are moved as
    they come: no thread is left to crash when the process ends.

    Args:
        loader: any iterable of batches.
        device: where tensors go.
        **kwargs: torch_xla's options, for its loader.
    """

    def __init__(self, loader: Iterable[T], device: torch.device | str, **kwargs: Tree) -> None:
        self._loader, self._device, self._options = loader, torch.device(device), kwargs

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[T]:
        if self._device.type == "xla" and has_accelerator():
            from torch_xla.distributed.parallel_loader import MpDeviceLoader as Original

            yield from Original(self._loader, self._device, **self._options)
            return
        backend = current_backend()
        for batch in self._loader:
            yield tree_map_only(torch.Tensor, lambda t: t.to(self._device), batch)
            backend.mark_step()
