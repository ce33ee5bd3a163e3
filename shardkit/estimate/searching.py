"""How many ranks it takes."""

from __future__ import annotations

from .stepping import Estimate, Subject, estimate

_MOST = 2**20


def smallest_ranks(subject: Subject, strategy: str, batch: int, limit: int) -> Estimate | None:
    """The estimate for the fewest ranks whose peak is at most ``limit`` bytes; None if no number of ranks is enough.

    What every rank holds whole (activations, a gathered unit) does not shrink with ranks: where doubling them changes
    the peak by less than 1 %, more are not tried.
    """
    found = estimate(subject, strategy, 1, batch)
    too_few = 0
    while found.peak > limit:
        before, too_few = found.peak, found.ranks
        found = estimate(subject, strategy, 2 * too_few, batch)
        if found.peak > limit and (found.peak > 0.99 * before or found.ranks >= _MOST):
            return None
    while found.ranks - too_few > 1:
        middle = estimate(subject, strategy, (found.ranks + too_few) // 2, batch)
        if middle.peak <= limit:
            found = middle
        else:
            too_few = middle.ranks
    return found
