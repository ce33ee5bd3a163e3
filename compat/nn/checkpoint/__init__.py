"""fairscale.nn.checkpoint."""

import contextlib
from collections.abc import Iterator
from types import ModuleType

import torch
from torch import nn

from shardkit.types import StateDict
from shardkit.wrapping import activations as _core
from shardkit.wrapping.activations import is_checkpointing, is_recomputing

__all__ = ["checkpoint_wrapper", "is_checkpointing", "is_recomputing"]


def checkpoint_wrapper(
    module: nn.Module, offload_to_cpu: bool = False, maintain_forward_counter: object = None
) -> nn.Module:
    """Does what :func:`shardkit.wrapping.activations.checkpoint_wrapper` does.

    Args:
        module: changed in place.
        offload_to_cpu: keep the inputs in host memory.
        maintain_forward_counter: ignored; fairscale had it up to 0.4.0.
    """
    return _core.checkpoint_wrapper(module, offload_to_cpu)


def _accelerator() -> ModuleType | None:
    return torch.get_device_module() if torch.accelerator.is_available() else None


def get_rng_state() -> StateDict:
    """Returns random states of the CPU ("torch_rng_state") and of the current accelerator ("cuda_rng_state")."""
    state = {"torch_rng_state": torch.get_rng_state()}
    if (accelerator := _accelerator()) is not None:
        state["cuda_rng_state"] = accelerator.get_rng_state()
    return state


def set_rng_state(state: StateDict) -> None:
    torch.set_rng_state(state["torch_rng_state"])
    if (accelerator := _accelerator()) is not None:
        accelerator.set_rng_state(state["cuda_rng_state"])


def is_autocast_enabled() -> bool:
    """Says whether autocast is on for the accelerator."""
    return torch.is_autocast_enabled()


@contextlib.contextmanager
def autocast(enabled: bool) -> Iterator[None]:
    """Turns on autocast of the accelerator where ``enabled``; else all stays as it is."""
    kind = torch.accelerator.current_accelerator()
    with torch.autocast(kind.type if kind else "cpu") if enabled else contextlib.nullcontext():
        yield
