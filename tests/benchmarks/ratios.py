"""Ratios of one implementation to another in the same round, as a median with an interval."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tests.benchmarks.machine import QUIET

ENOUGH = 5  # quiet rounds from which the others are left out
_RESAMPLES = 2000


class Timing(NamedTuple):
    """One block of one implementation.

    Attributes:
        cpu: CPU seconds a step, summed over ranks.
        system: the part of it in the kernel.
        wall: seconds a step, of the slowest rank.
        foreign: share of the machine that others used; None where unknown.
    """

    cpu: float
    system: float
    wall: float
    foreign: float | None

    @property
    def is_quiet(self) -> bool:
        return self.foreign is None or self.foreign < QUIET


Round = dict[str, Timing]  # by name


class Ratio(NamedTuple):
    """Median with a 95 % bootstrap interval."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


def with_interval(values: Sequence[float]) -> Ratio:
    """The median, and where 95 % of the medians of resampled values lie."""
    generator = random.Random(0)
    medians = sorted(statistics.median(generator.choices(values, k=len(values))) for _ in range(_RESAMPLES))
    return Ratio(
        statistics.median(values), medians[int(0.025 * _RESAMPLES)], medians[int(0.975 * _RESAMPLES) - 1]
    )


def usable(rounds: Sequence[Round], names: Sequence[str]) -> list[Round]:
    """The rounds in which others left all of these alone; all rounds if those are too few."""
    quiet = [r for r in rounds if all(r[n].is_quiet for n in names)]
    return quiet if len(quiet) >= ENOUGH else list(rounds)


def ratio(rounds: Sequence[Round], name: str, reference: str, of: Callable[[Timing], float]) -> Ratio:
    """Of some figure, round by round."""
    return with_interval([of(r[name]) / of(r[reference]) for r in usable(rounds, (name, reference))])


def overhead_ratio(rounds: Sequence[Round], name: str, reference: str, bare: str) -> Ratio:
    """Of the CPU time that each spends beyond a model without a wrapper."""
    return with_interval(
        [
            (r[name].cpu - r[bare].cpu) / (r[reference].cpu - r[bare].cpu)
            for r in usable(rounds, (name, reference, bare))
        ]
    )


def median_of(rounds: Sequence[Round], name: str, of: Callable[[Timing], float]) -> float:
    """Of some figure."""
    return statistics.median(of(r[name]) for r in usable(rounds, (name,)))
