"""Values that a module starts with: of parameters on the meta device, and of buffers on another one."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from ..errors import ConfigurationError
from ..fsdp.state import modules_outside_units


def materialize(module: nn.Module, init: Callable[[nn.Module], object] | None) -> None:
    """Gives a module's own parameters their initial values if they are on the meta device.

    Args:
        init: initialises the module; default: its ``reset_parameters()``.

    Raises:
        ConfigurationError: there is no ``reset_parameters()`` either.
    """
    own = [m for _, m in modules_outside_units(module)]
    if not any(p is not None and p.is_meta for m in own for p in m._parameters.values()):
        return
    if init is not None:
        init(module)
        return
    reset = getattr(module, "reset_parameters", None)
    if reset is None:
        raise ConfigurationError(
            f"parameters of {type(module).__name__} are on the meta device and it has no reset_parameters() to "
            "initialise them; pass param_init_fn"
        )
    module.to_empty(device="cpu")
    with torch.no_grad():
        reset()


def move_buffers(module: nn.Module, device: torch.device) -> None:
    """Buffers of a module and those below it move to a device, in place."""
    for m in module.modules():
        for name, buffer in m._buffers.items():
            if buffer is not None and buffer.device != device:
                m._buffers[name] = buffer.to(device)
