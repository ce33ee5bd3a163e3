"""What is the same for every backend whose tensors live on the CPU."""

from __future__ import annotations

import torch

from .eager import EagerBackend


class Host(EagerBackend):
    """CPU tensors: nothing that overlaps, torch's default generator."""

    device_type = "cpu"

    def device(self) -> torch.device:
        return torch.device("cpu")

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def synchronize(self) -> None:
        return

    def rng_state(self) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        torch.set_rng_state(state)
