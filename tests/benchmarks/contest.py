"""Implementations that take turns: each in rank processes of its own, one of them stepping at a time."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any

from shardkit.backends.processes import RankPool
from tests.benchmarks import ranks
from tests.benchmarks.machine import Foreign, Patience
from tests.benchmarks.ratios import Timing

_PATIENCE_SECONDS = 60.0


def order_of_round(names: Sequence[str], number: int) -> list[str]:
    """Who steps when: the order rotates, and every other round runs backwards."""
    shift = (number // 2) % len(names)
    order = [*names[shift:], *names[:shift]]
    return order[::-1] if number % 2 else order


class Contest:
    """Pools of ranks, all waiting except the one that was handed the baton.

    Args:
        entries: name of the entry -> implementation.
        model: "gpt" or "tinymlp".
        world_size: ranks of each entry.
    """

    def __init__(self, entries: dict[str, str], model: str, world_size: int) -> None:
        self._entries = entries
        self._model = model
        self._world_size = world_size
        self._patience = Patience(_PATIENCE_SECONDS)
        self._closing = ExitStack()
        self._pools: dict[str, RankPool] = {}

    def __enter__(self) -> Contest:
        for name in self._entries:
            pool = RankPool(self._world_size, timeout=600, environment={"OMP_NUM_THREADS": "1"})
            self._pools[name] = self._closing.enter_context(pool)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.__exit__(kind, error, trace)

    def first_losses(self) -> dict[str, list[list[float]]]:
        """Builds the models; name -> [W][first steps] losses."""
        return {
            name: pool.run(ranks.prepare, self._entries[name], self._model)
            for name, pool in self._pools.items()
        }

    def counted(self) -> dict[str, list[dict[str, float]]]:
        """Name -> counted figures of each rank."""
        return {name: pool.run(ranks.count) for name, pool in self._pools.items()}

    def versions(self) -> dict[str, str]:
        return next(iter(self._pools.values())).run(ranks.versions)[0]

    def run_round(self, number: int, steps: int) -> dict[str, Timing]:
        """One block of every entry."""
        found = {}
        for name in order_of_round(list(self._pools), number):
            self._patience.wait_for_quiet()
            found[name] = self._time(self._pools[name], steps)
        return found

    @staticmethod
    def _time(pool: RankPool, steps: int) -> Timing:
        watch = Foreign()
        blocks: list[Any] = pool.run(ranks.time_block, steps)
        foreign = watch.share(sum(b.whole for b in blocks))
        return Timing(sum(b.cpu for b in blocks) / steps, max(b.wall for b in blocks) / steps, foreign)
