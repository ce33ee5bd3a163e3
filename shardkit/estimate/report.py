"""Estimates for people, and as data."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ..tables import counted, in_bytes, plain_table
from ..types import StateDict
from .memory import KINDS
from .stepping import Estimate, Subject


def as_text(subject: Subject, estimates: Sequence[Estimate], limit: int | None = None) -> str:
    """A table, a line for each estimate; ``limit`` is what a device has, in bytes."""
    head = ("strategy", "ranks", "batch", "peak", *KINDS, "sent a step", "fits")
    rows = [
        (e.strategy, f"{e.ranks:,}", f"{e.batch:,}", in_bytes(e.peak), *[in_bytes(e.kinds[kind]) for kind in KINDS],
         in_bytes(e.sent), "" if limit is None else "yes" if e.peak <= limit else "no")
        for e in estimates
    ]  # fmt: skip
    title = f"{subject.name}: {counted(estimates[0].parameters, 'parameter')}; the fullest rank, at the peak of a step"
    return f"{title}\n{plain_table(head, rows, right=range(1, 10))}"


def as_data(subject: Subject, estimates: Sequence[Estimate]) -> StateDict:
    """For JSON: bytes, and numbers of collectives."""
    return {"subject": subject.name, "estimates": [dataclasses.asdict(e) for e in estimates]}


def in_words(strategy: str, batch: int, limit: int, found: Estimate | None) -> str:
    """How many ranks it takes."""
    if found is None:
        return f"{strategy}, batch {batch}: no number of ranks is enough for {in_bytes(limit)} on each"
    return (
        f"{strategy}, batch {batch}: {counted(found.ranks, 'rank')} {'is' if found.ranks == 1 else 'are'} enough for "
        f"{in_bytes(limit)} on each ({in_bytes(found.peak)})"
    )
