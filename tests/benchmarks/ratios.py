"""Ratios of an implementation to the reference of the same round, as a median with an interval."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from tests.benchmarks.machine import QUIET

ENOUGH = 5  # quiet rounds from which the others are left out
_RESAMPLES = 2000


class Timing(NamedTuple):
    """One block of one implementation.

    Attributes:
        cpu: CPU seconds a step, summed over ranks.
        wall: seconds a step, of the slowest rank.
        foreign: share of the machine that others used; None where unknown.
    """

    cpu: float
    wall: float
    foreign: float | None

    @property
    def is_quiet(self) -> bool:
        return self.foreign is None or self.foreign < QUIET


class Ratio(NamedTuple):
    """Median with a 95 % bootstrap interval."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


class Comparison(NamedTuple):
    """An implementation beside the reference.

    Attributes:
        rounds: how many of them counted.
        only_quiet: whether noisy rounds were left out.
    """

    cpu: Ratio
    wall: Ratio
    rounds: int
    only_quiet: bool


def with_interval(values: Sequence[float]) -> Ratio:
    """The median, and where 95 % of the medians of resampled values lie."""
    generator = random.Random(0)
    medians = sorted(statistics.median(generator.choices(values, k=len(values))) for _ in range(_RESAMPLES))
    return Ratio(
        statistics.median(values), medians[int(0.025 * _RESAMPLES)], medians[int(0.975 * _RESAMPLES) - 1]
    )


def compare(blocks: Sequence[Timing], reference: Sequence[Timing]) -> Comparison:
    """Compares round by round; noisy rounds count only where there are too few quiet ones.

    Args:
        blocks, reference: one for each round.
    """
    pairs = list(zip(blocks, reference, strict=True))
    quiet = [(a, b) for a, b in pairs if a.is_quiet and b.is_quiet]
    used = quiet if len(quiet) >= ENOUGH else pairs
    return Comparison(
        with_interval([a.cpu / b.cpu for a, b in used]),
        with_interval([a.wall / b.wall for a, b in used]),
        len(used),
        only_quiet=used is quiet,
    )
