"""The device under TorchTPU's name and rules, as they are in torch_tpu 0.2.0.

What the wheel's sources and messages say of it is in test_torch_tpu.py, which holds them to the wheel.
"""

from __future__ import annotations

import datetime
import functools
import os
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from .build import NAME, library, load
from .device import DEVICES, LATE_US, gloo

# Of torch.tpu: what only torch may call, since torch.accelerator has it.
INTERNAL = (
    "current_device", "set_device", "is_available", "device_count", "synchronize", "get_rng_state", "set_stream",
    "current_stream",
)  # fmt: skip


def register() -> Any:
    """What importing torch does where torch_tpu is installed and a TPU is there."""
    late = load(NAME, library())
    bound = int(os.environ.get("LOCAL_RANK", "0")) % DEVICES
    late.configure(DEVICES, bound, True, False, LATE_US)
    torch.utils.rename_privateuse1_backend("tpu")
    if hasattr(torch, "tpu"):
        del torch.tpu
    torch._register_device_module("tpu", _module(late))
    torch.utils.generate_methods_for_privateuse1_backend()
    for name in ("tpu_dist", "tpu"):
        make = functools.partial(as_torch_tpu_makes_them, functools.partial(_late_group, late))
        dist.Backend.register_backend(name, make, devices=["tpu"])
    return late


def _module(late: Any) -> types.ModuleType:
    """torch.tpu"""
    module: Any = types.ModuleType("torch.tpu")
    own: dict[str, Callable[..., Any]] = {
        "current_device": late.current_device,
        "set_device": late.set_device,
        "is_available": lambda: True,
        "device_count": late.device_count,
        "synchronize": torch.accelerator.synchronize,
        "get_rng_state": lambda device="tpu": torch.get_rng_state(),
        "set_stream": torch.accelerator.set_stream,
        "current_stream": torch.accelerator.current_stream,
    }
    for name in INTERNAL:
        setattr(module, name, _for_torch_alone(name, own[name]))
    module.is_initialized = lambda: True
    module.set_rng_state = lambda state, device="tpu": torch.set_rng_state(state)
    module._is_in_bad_fork = lambda: False
    module.manual_seed = module.manual_seed_all = lambda seed: None
    module.default_generators = (torch.default_generator,) * DEVICES
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    return module


def _for_torch_alone(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1).f_globals.get("__name__") or ""
        if caller != "torch" and not caller.startswith("torch."):
            raise RuntimeError(
                f"{name} is internal to TorchTPU and can only be called by the PyTorch framework"
            )
        return function(*args, **kwargs)

    return call


def _late_group(late: Any, store: Any, rank: int, size: int, timeout: datetime.timedelta) -> Any:
    return late.group(gloo(store, rank, size, timeout), "tpu_dist", True)


_made = 0  # process groups that are smaller than the job


def as_torch_tpu_makes_them(
    make: Callable[..., Any], store: Any, rank: int, size: int, timeout: datetime.timedelta
) -> Any:
    """A process group; the smaller ones are made by all ranks at once, and partition them."""
    global _made
    world = dist.get_world_size() if dist.is_initialized() else size
    if size != int(os.environ["WORLD_SIZE"]) and not dist.is_initialized():
        raise RuntimeError("the first initialized ProcessGroupTpu must be of size WORLD_SIZE")
    if size < world:
        _made += 1
        job = dist.group.WORLD.get_group_store()
        store.set(f"member/{rank}", str(dist.get_rank()))
        members = ",".join(store.get(f"member/{r}").decode() for r in range(size))
        job.set(f"_torchtpu_internal_gather_all_subgroups/{_made}/{dist.get_rank()}", members)
        all_of = {
            job.get(f"_torchtpu_internal_gather_all_subgroups/{_made}/{r}").decode() for r in range(world)
        }
        if sorted(int(r) for group in all_of for r in group.split(",")) != list(range(world)):
            raise RuntimeError("Incomplete or overlapping subgroups are not supported in SPMD.")
    return make(store, rank, size, timeout)
