"""What is the same for every backend whose tensors live on the CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch


class NoEvent:
    """Work on the CPU is done when it was issued."""

    def wait(self) -> None:
        return

    def synchronize(self) -> None:
        return


class Host:
    """CPU tensors: storage that can be resized, nothing that overlaps, torch's default generator."""

    device_type = "cpu"
    even_shards_only = False
    has_storage = True

    def device(self) -> torch.device:
        return torch.device("cpu")

    def take_storage(self, tensor: torch.Tensor) -> None:
        tensor.untyped_storage().resize_(storage_bytes(tensor))

    def release_storage(self, tensor: torch.Tensor) -> None:
        tensor.untyped_storage().resize_(0)

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def new_stream(self) -> Any:
        return None

    def stream(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def record_event(self) -> NoEvent:
        return NoEvent()

    def synchronize(self) -> None:
        return

    def mark_step(self, *, wait: bool = False) -> None:
        return

    def tie(self, tensors: Sequence[torch.Tensor]) -> None:
        return

    def rng_state(self) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        torch.set_rng_state(state)


def storage_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor that owns its whole storage."""
    return (int(tensor.storage_offset()) + tensor.numel()) * tensor.element_size()
