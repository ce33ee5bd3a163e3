"""What backends ask of torch's module for a kind of device (torch.cuda, torch.xpu, ...)."""

from __future__ import annotations

from types import ModuleType
from typing import Protocol

import torch


class DeviceModule(Protocol):
    """What is used of such a module."""

    def is_available(self) -> bool: ...
    def is_initialized(self) -> bool: ...
    def device_count(self) -> int: ...
    def current_device(self) -> int: ...
    def set_device(self, device: int, /) -> None: ...
    def synchronize(self, device: torch.device, /) -> None: ...
    def get_rng_state(self, device: torch.device, /) -> torch.Tensor: ...
    def set_rng_state(self, state: torch.Tensor, device: torch.device, /) -> None: ...


class TorchAccelerator:
    """The same, of ``torch.accelerator``: it is there for every device, and some vendors' modules are torch's alone to
    call (TorchTPU's raises for others)."""

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type

    @property
    def _module(self) -> ModuleType:
        return torch.get_device_module(self._device_type)

    def is_available(self) -> bool:
        known = torch.accelerator.current_accelerator()
        return known is not None and known.type == self._device_type and torch.accelerator.is_available()

    def is_initialized(self) -> bool:
        return True  # asking for the current device is what a rank begins with

    def device_count(self) -> int:
        return torch.accelerator.device_count()

    def current_device(self) -> int:
        return torch.accelerator.current_device_index()

    def set_device(self, device: int, /) -> None:
        torch.accelerator.set_device_index(device)

    def synchronize(self, device: torch.device, /) -> None:
        torch.accelerator.synchronize(device)

    def get_rng_state(self, device: torch.device, /) -> torch.Tensor:
        return self._module.get_rng_state(device)

    def set_rng_state(self, state: torch.Tensor, device: torch.device, /) -> None:
        self._module.set_rng_state(state, device)
