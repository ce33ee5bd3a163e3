"""Common parts of every device family whose tensors own memory and whose operations run as they are called."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence

import torch

from shardkit.backend import Backend
from shardkit.types import Tree


class EagerBackend(Backend):
    """Storage that can be resized, and nothing to run later."""

    def take_storage(self, tensor: torch.Tensor) -> None:
        numel = int(tensor.storage_offset()) + tensor.numel()  # it owns its whole storage
        tensor.untyped_storage().resize_(numel * tensor.element_size())

    def release_storage(self, tensor: torch.Tensor) -> None:
        """The memory goes back to the current stream's pool; other streams that use it have to be waited for before."""
        tensor.untyped_storage().resize_(0)

    def mark_step(self, *, wait: bool = False) -> None:
        """Nothing: operations have been run."""

    def tie(self, tensors: Sequence[torch.Tensor]) -> None:
        """Nothing: operations run in the order of their calls."""


class Host(EagerBackend):
    """CPU tensors: nothing that overlaps, torch's default generator."""

    device_type = "cpu"

    def device(self) -> torch.device:
        return torch.device("cpu")

    def synchronize(self) -> None:
        return

    def rng_state(self) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        torch.set_rng_state(state)


# ------------------------------------------------------------ generators of the host
HostRandomStates = tuple[
    torch.Tensor, tuple[object, ...], Tree
]  # of torch, random, numpy (None if not imported)


def host_random_states() -> HostRandomStates:
    numpy = sys.modules.get("numpy")
    return torch.get_rng_state(), random.getstate(), None if numpy is None else numpy.random.get_state()


def set_host_random_states(states: HostRandomStates) -> None:
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    if states[2] is not None:
        sys.modules["numpy"].random.set_state(states[2])
