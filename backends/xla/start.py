"""How a process becomes one of replicas."""

from __future__ import annotations

from . import syncing, torch_xla_api
from .cpu_replicas import World, make_world


def start_world(size: int) -> World:
    """Makes the replicas of this process and routes its syncs through them. Once per process."""
    world = make_world(size)
    syncing.install(world)
    torch_xla_api.install(world)
    return world
