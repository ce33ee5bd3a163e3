"""How a process becomes one of replicas."""

from __future__ import annotations

import torch
import torch._dynamo.config as compiling
import torch_xla.core.xla_model as xm
import torch_xla.runtime

from ..process_facts import memory
from . import syncing, torch_xla_api
from .cpu_replicas import World, make_world
from .rules import ordinals


def start_world(size: int) -> World:
    """Makes the replicas of this process and routes its syncs through them. Once per process."""
    world = make_world(size)
    syncing.install(world)
    torch_xla_api.install(world)

    def get_memory_info(device: torch.device | str | None = None) -> dict[str, int]:
        # XLA has no figures on a CPU: a replica's share of what the process holds, and of the machine
        now, most, machine = (n // size for n in memory())
        return {"bytes_used": now, "bytes_limit": machine, "peak_bytes_used": most}

    xm.get_memory_info = get_memory_info
    # Each replica compiles as a process of its own would; torch keeps so many versions of a function in a process, and
    # runs it as written from then on. The first replicas would stop for compiling where the last ones do not.
    compiling.recompile_limit *= size
    compiling.accumulated_recompile_limit *= size
    if world.rules.pod:
        vars(torch_xla.runtime).update(ordinals(world.rules, size, lambda: world.here().rank))
    return world
