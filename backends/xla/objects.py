"""Python objects between replicas, and from a replica to its caller."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any

import torch

from shardkit.types import Tree


def _here(host: torch.Tensor) -> torch.Tensor:
    import torch_xla

    return host.to(torch_xla.device())


def _same(host: torch.Tensor) -> torch.Tensor:
    return host


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, rebuild: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._rebuild = rebuild

    def reducer_override(self, obj: object) -> Any:
        # torch's own form of an XLA tensor names the sender's device, which the receiver doesn't have.
        if isinstance(obj, torch.Tensor) and obj.device.type == "xla":
            return self._rebuild, (obj.detach().cpu(),)
        return NotImplemented


def pack(obj: object, *, to_host: bool = False) -> bytes:
    """``obj`` pickled; its XLA tensors come back on the reader's XLA device, or on the CPU (``to_host``)."""
    file = io.BytesIO()
    _Pickler(file, _same if to_host else _here).dump(obj)
    return file.getvalue()


def unpack(data: bytes) -> Tree:
    return pickle.loads(data)
