"""Makes a process a rank whose accelerator is the device."""

from __future__ import annotations

import os

from shardkit.backends.processes import join_ranks
from shardkit.backends.tpu import ADDRESSES, TOPOLOGY

from . import tpu
from .device import DEVICES, register


def start_late(rank: int, world_size: int, rendezvous: str, backend: str) -> None:
    """A device that shardkit has no class for."""
    register("late", DEVICES)
    join_ranks(rank, world_size, rendezvous, backend)


def start_tpu(rank: int, world_size: int, rendezvous: str, backend: str) -> None:
    """TorchTPU's rules."""
    os.environ[ADDRESSES] = ",".join(f"localhost:{8070 + r}" for r in range(world_size))
    os.environ[TOPOLOGY] = "2,2,1"
    tpu.register()
    join_ranks(rank, world_size, rendezvous, backend)
