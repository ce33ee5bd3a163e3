"""Makes a process a rank whose accelerator is torch_tpu's."""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
import torch.distributed as dist

from shardkit.backends.processes import join_ranks
from tests.late_device.build import load
from tests.late_device.device import gloo
from tests.late_device.tpu import as_torch_tpu_makes_them

from .runtime import begin, host_group


def start(rank: int, world_size: int, rendezvous: str, backend: str) -> None:
    """Of one rank the process group is torch_tpu's too; those of several need chips that see each other."""
    module = begin()
    if world_size > 1:
        _take_a_chip(module)
        host = load(*host_group())
        for name in ("tpu_dist", "tpu"):
            make = functools.partial(as_torch_tpu_makes_them, functools.partial(_over_host, host))
            dist.Backend.register_backend(name, make, devices=["tpu"])
    join_ranks(rank, world_size, rendezvous, backend)


def _take_a_chip(module: Any) -> None:
    """As a job of one rank: of this one the runtime sees no other."""
    job = {name: os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")}
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    torch.zeros(1, device="tpu").cpu()
    assert module.is_initialized()
    os.environ |= job


def _over_host(module: Any, store: Any, rank: int, size: int, timeout: Any) -> Any:
    return module.group(gloo(store, rank, size, timeout), "tpu_dist")
