"""Implementations that take turns: each in rank processes of its own, one of them stepping at a time."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any

from shardkit.backends.processes import RankPool
from tests.benchmarks import ranks
from tests.benchmarks.machine import Foreign, Patience
from tests.benchmarks.ratios import Timing
from tests.figures.measure import count_step, ranks_of

_PATIENCE_SECONDS = 120.0
# first word of an implementation's name -> package
_NEEDS = {"fairscale": "fairscale", "deepspeed": "deepspeed"}


def missing_package(implementation: str) -> str:
    """What has to be installed for it and is not; "" if nothing."""
    package = _NEEDS.get(implementation.partition("_")[0], "")
    return package if package and importlib.util.find_spec(package) is None else ""


def order_of_round(names: Sequence[str], number: int) -> list[str]:
    """Who steps when: the order rotates, and every other round runs backwards."""
    shift = (number // 2) % len(names)
    order = [*names[shift:], *names[:shift]]
    return order[::-1] if number % 2 else order


class Contest:
    """Pools of ranks, all waiting except the one that was handed the baton.

    Args:
        entries: name of the entry -> implementation.
        model: one of ``MODELS`` of ``tests/figures/gpt.py``.
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
        for name, implementation in self._entries.items():
            self._pools[name] = self._closing.enter_context(
                ranks_of(implementation, self._world_size, 600, PYTHONWARNINGS="ignore")
            )
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

    def counted(self, wire: bool) -> dict[str, list[dict[str, Any]]]:
        """Implementation -> counted figures of each rank. The last thing to ask for: it lets the models go."""
        found: dict[str, list[dict[str, Any]]] = {}
        for name, pool in self._pools.items():
            implementation = self._entries[name]
            if implementation not in found:
                pool.run(ranks.forget)
                found[implementation] = pool.run(count_step, implementation, self._model, wire)
        return found

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
        return Timing(
            sum(b.cpu for b in blocks) / steps,
            sum(b.system for b in blocks) / steps,
            max(b.wall for b in blocks) / steps,
            foreign,
        )
