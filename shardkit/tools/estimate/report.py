"""Estimates for people, and as data."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ...tracing.tables import counted, in_bytes, in_time, plain_table
from ...types import StateDict
from .devices import Device
from .memory import KINDS
from .stepping import Estimate
from .strategies import Subject


def as_text(subject: Subject, estimates: Sequence[Estimate], limit: float | None = None) -> str:
    """A table, a line for each estimate; ``limit`` is what a device has, in bytes."""
    head = ("strategy", "ranks", "batch", "peak", *KINDS, "sent a step", "fits")
    rows = [
        (e.strategy, f"{e.ranks:,}", f"{e.batch:,}", in_bytes(e.peak), *[in_bytes(e.kinds[kind]) for kind in KINDS],
         in_bytes(e.sent), "" if limit is None else "yes" if e.peak <= limit else "no")
        for e in estimates
    ]  # fmt: skip
    title = f"{subject.name}: {counted(estimates[0].parameters, 'parameter')}; the fullest rank, at the peak of a step"
    return f"{title}\n{plain_table(head, rows, right=range(1, 10))}"


def times_as_text(subject: Subject, estimates: Sequence[Estimate], device: Device) -> str:
    """A table of times, a line for each schedule of each estimate."""
    what = "tokens" if subject.tokens else "samples"
    head = (
        "schedule",
        "ranks",
        "batch",
        "step",
        "exposed",
        "of it",
        "collectives",
        "in flight",
        f"{what}/s a rank",
        "all ranks",
    )
    rows = []
    for e in estimates:
        for name, t in e.times.items():
            rate = e.batch * max(1, subject.tokens) / t.step
            rows.append(
                (name, f"{e.ranks:,}", f"{e.batch:,}", in_time(1e6 * t.step), in_time(1e6 * t.exposed),
                 f"{100 * t.exposed / t.step:.1f} %", in_time(1e6 * t.communicating), in_bytes(t.in_flight),
                 f"{rate:,.0f}", f"{rate * e.ranks:,.0f}")
            )  # fmt: skip
    title = f"a step on {device.name}; {device.source or 'no source is given'}"
    return f"{title}\n{plain_table(head, rows, right=range(1, 10))}"


def as_data(subject: Subject, estimates: Sequence[Estimate]) -> StateDict:
    """For JSON: bytes, numbers of collectives, seconds."""
    return {"subject": subject.name, "estimates": [dataclasses.asdict(e) for e in estimates]}


def in_words(strategy: str, batch: int, limit: int, found: Estimate | None) -> str:
    """How many ranks it takes."""
    if found is None:
        return f"{strategy}, batch {batch}: no number of ranks is enough for {in_bytes(limit)} on each"
    return (
        f"{strategy}, batch {batch}: {counted(found.ranks, 'rank')} {'is' if found.ranks == 1 else 'are'} enough for "
        f"{in_bytes(limit)} on each ({in_bytes(found.peak)})"
    )
