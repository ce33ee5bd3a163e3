"""Where replicas meet in a test that counts: a barrier of a group is a collective, and would be counted."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from shardkit.backend import get_backend


def meet() -> None:
    """All replicas are here, and what they have recorded has run."""
    from shardkit.backends.xla.meeting import ReplicaCall
    from shardkit.backends.xla.runtime import current_world

    get_backend("xla").mark_step(wait=True)
    world = current_world()
    assert world is not None
    world.here().meet("meet", [ReplicaCall(tuple(range(world.size)), "meet")])


def in_memory(state: Any) -> Any:
    """What a replica's host is without a TPU's rules, whatever they are: objects cost no program."""
    from shardkit.backends.xla.meeting import ReplicaCall
    from shardkit.backends.xla.runtime import replica_groups

    def exchange(ranks: Sequence[int], what: str, label: str, payload: bytes) -> list[bytes]:
        payloads = state.meet(what, [ReplicaCall(tuple(ranks), what, label)], payload)
        return [payloads[rank] for rank in ranks]

    def partition(ranks: Sequence[int], siblings: Sequence[Sequence[int]]) -> list[list[int]]:
        return replica_groups(ranks, siblings, state.world.size)

    return SimpleNamespace(issued=state.issued, abort=state.abort, exchange=exchange, partition=partition)
