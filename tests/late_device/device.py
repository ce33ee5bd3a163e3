"""Makes the compiled device one of torch's, in this process, for good: its name, its module, its collectives."""

from __future__ import annotations

import datetime
import types
from typing import Any

import torch
import torch.distributed as dist

from .build import NAME, library, load

LATE_US = 300
DEVICES = 4


def register(name: str, devices: int, late_us: int = LATE_US) -> Any:
    """As vendors do it.

    Args:
        name: of the device type, and of its library of collectives.
        devices: that this process sees.
        late_us: how late collectives begin.
    """
    late = load(NAME, library())
    late.configure(devices, 0, False, True, late_us)
    torch.utils.rename_privateuse1_backend(name)
    torch._register_device_module(name, _module(name, late))
    torch.utils.generate_methods_for_privateuse1_backend()

    def group(store: Any, rank: int, size: int, timeout: datetime.timedelta) -> Any:
        return late.group(gloo(store, rank, size, timeout), name, False)

    dist.Backend.register_backend(name, group, devices=[name])
    return late


def gloo(store: Any, rank: int, size: int, timeout: datetime.timedelta) -> Any:
    """What carries the messages."""
    return dist.ProcessGroupGloo(store, rank, size, timeout)


def _module(name: str, late: Any) -> types.ModuleType:
    """Like torch.cuda."""
    module: Any = types.ModuleType(f"torch.{name}")
    module.is_available = lambda: late.device_count() > 0
    module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module.device_count = late.device_count
    module.current_device = late.current_device
    module.set_device = lambda device: late.set_device(torch.device(name, device).index)
    module.synchronize = torch.accelerator.synchronize
    module.memory_allocated = late.bytes
    module.manual_seed = module.manual_seed_all = lambda seed: None  # the CPU's generator serves it
    module.get_rng_state = lambda device=name: torch.get_rng_state()
    module.set_rng_state = lambda state, device=name: torch.set_rng_state(state)
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    return module
