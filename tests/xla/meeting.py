"""Where replicas meet in a test that counts: a barrier of a group is a collective, and would be counted."""

from __future__ import annotations

from shardkit.backend import get_backend


def meet() -> None:
    """All replicas are here, and what they have recorded has run."""
    from shardkit.backends.xla.cpu_replicas import current_world
    from shardkit.backends.xla.meeting import Call

    get_backend("xla").mark_step(wait=True)
    world = current_world()
    assert world is not None
    world.here().meet("meet", [Call(tuple(range(world.size)), "meet")])
