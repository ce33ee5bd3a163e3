"""Which partition of a pipeline stashes what another one pops: ``fairscale.nn.pipe.skip.layout``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import nn

from .skip import Key, Namespace, Skippable


class SkipLayout:
    """Routes of skip tensors between partitions.

    Args:
        num_partitions: how many there are.
        skip_routes: namespace (None: the common one) and name -> the partitions that stash and pop it.

    Attributes:
        by_ns_name: the routes given.
        by_partition: for each partition, (where from, namespace, name) of what it pops, in order of partitions
            and names.
        by_src_partition: for each partition, (where to, namespace, name) of what it stashes, in order
            of partitions and names.
    """

    def __init__(self, num_partitions: int, skip_routes: Mapping[Key, tuple[int, int]]) -> None:
        self.by_ns_name = dict(skip_routes)
        self.by_partition: list[list[tuple[int, Namespace | None, str]]] = [[] for _ in range(num_partitions)]
        self.by_src_partition: list[list[tuple[int, Namespace | None, str]]] = [
            [] for _ in range(num_partitions)
        ]
        for (ns, name), (stashing, popping) in skip_routes.items():
            self.by_partition[popping].append((stashing, ns, name))
            self.by_src_partition[stashing].append((popping, ns, name))
        for found in (*self.by_partition, *self.by_src_partition):
            found.sort(key=lambda route: (route[0], route[2]))

    def copy_policy_by_src(self, prev_j: int) -> Iterable[tuple[int, Namespace | None, str]]:
        """(where to, namespace, name) of what a partition stashes and others pop."""
        return (route for route in self.by_src_partition[prev_j] if route[0] != prev_j)

    def copy_policy(self, next_j: int) -> Iterable[tuple[int, Namespace | None, str]]:
        """(where from, namespace, name) of what a partition pops and others stash."""
        return (route for route in self.by_partition[next_j] if route[0] != next_j)

    def requires_copy(self, ns: Namespace | None, name: str) -> bool:
        """Whether a skip tensor leaves its partition."""
        stashing, popping = self.by_ns_name.get((ns, name), (-1, -1))
        return stashing != popping


def inspect_skip_layout(partitions: Sequence[nn.Sequential]) -> SkipLayout:
    """The routes of the skip tensors of these partitions' layers."""
    stashed: dict[Key, int] = {}
    routes: dict[Key, tuple[int, int]] = {}
    for k, partition in enumerate(partitions):
        for layer in partition:
            if isinstance(layer, Skippable):
                stashed.update(dict.fromkeys(layer.stashable(), k))
                routes.update({key: (stashed.pop(key), k) for key in layer.poppable()})
    return SkipLayout(len(partitions), routes)
