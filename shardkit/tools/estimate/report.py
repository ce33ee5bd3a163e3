"""Estimates for people, and as data."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ...tracing.tables import counted, in_bytes, in_time, plain_table
from ...types import StateDict
from ..trace import new_figure
from .devices import Device
from .stepping import KINDS, Estimate
from .subjects import Subject

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def as_text(subject: Subject, estimates: Sequence[Estimate], limit: float | None = None) -> str:
    """Returns a table, a line for each estimate; ``limit`` is what a device has, in bytes."""
    head = ("strategy", "ranks", "batch", "peak", *KINDS, "sent a step", "fits")
    rows = []
    for e in estimates:
        sizes = map(in_bytes, (e.peak, *(e.kinds[kind] for kind in KINDS), e.sent))
        fits = "" if limit is None else "yes" if e.peak <= limit else "no"
        rows.append((e.strategy, f"{e.ranks:,}", f"{e.batch:,}", *sizes, fits))
    title = f"{subject.name}: {counted(estimates[0].parameters, 'parameter')}; the fullest rank, at the peak of a step"
    return f"{title}\n{plain_table(head, rows, right=range(1, 10))}"


def times_as_text(subject: Subject, estimates: Sequence[Estimate], device: Device) -> str:
    """Returns a table of times, a line for each schedule of each estimate."""
    what = "tokens" if subject.tokens else "samples"
    times_of = ("step", "exposed", "of it", "collectives", "in flight")
    head = ("schedule", "ranks", "batch", *times_of, f"{what}/s a rank", "all ranks")
    rows = []
    for e in estimates:
        for name, t in e.times.items():
            rate = e.batch * max(1, subject.tokens) / t.step
            step, exposed, busy = (in_time(1e6 * time) for time in (t.step, t.exposed, t.communicating))
            times = (step, exposed, f"{100 * t.exposed / t.step:.1f} %", busy, in_bytes(t.in_flight))
            numbers = [f"{n:,.0f}" for n in (e.ranks, e.batch, rate, rate * e.ranks)]
            rows.append((name, *numbers[:2], *times, *numbers[2:]))
    title = f"a step on {device.name}; {device.source or 'no source is given'}"
    return f"{title}\n{plain_table(head, rows, right=range(1, 10))}"


def as_data(subject: Subject, estimates: Sequence[Estimate]) -> StateDict:
    """Returns what JSON takes: bytes, numbers of collectives, seconds."""
    return {"subject": subject.name, "estimates": [dataclasses.asdict(e) for e in estimates]}


def in_words(strategy: str, batch: int, limit: int, found: Estimate | None) -> str:
    if found is None:
        return f"{strategy}, batch {batch}: no number of ranks is enough for {in_bytes(limit)} on each"
    return (
        f"{strategy}, batch {batch}: {counted(found.ranks, 'rank')} {'is' if found.ranks == 1 else 'are'} enough for "
        f"{in_bytes(limit)} on each ({in_bytes(found.peak)})"
    )


_SIZES = (8, 12, 16, 24, 32, 40, 48, 64, 80, 96, 128, 141, 180, 192, 288)  # GB that devices are sold with


def device_in_words(found: Estimate) -> str:
    """Names the smallest device that has room, and a tenth more."""
    enough = [size for size in _SIZES if 1.1 * found.peak <= size * 1e9]
    what = f"a device of {enough[0]} GB is enough" if enough else "no single device is enough"
    return f"{found.strategy}, {counted(found.ranks, 'rank')}, batch {found.batch}: {what} ({in_bytes(found.peak)})"


# ------------------------------------------------------------ pictures
_GIB = 2**30
_MARKERS = "osD^v*"
Points = Sequence[tuple[int, float, float]]  # ranks, value, what of it is shaded


def plot(
    subject: Subject, estimates: Sequence[Estimate], path: str | Path, limit: float | None = None
) -> None:
    """Writes a picture (SVG, PNG or PDF, by the file's name).

    On the left is the first estimate's memory over a step (it has to have its course), then what a rank sends in a step
    for each strategy, beside DDP's two and FSDP2's three parts of the parameters in the same precision, then how long
    a step takes, if estimates have times.

    Args:
        limit: what a device has, in bytes.
    """
    first = estimates[0]
    alike = sorted((e for e in estimates if e.batch == first.batch), key=lambda e: e.ranks)
    times: dict[str, list[tuple[int, float, float]]] = {}
    for e in alike:
        for name, t in e.times.items():
            times.setdefault(name, []).append((e.ranks, t.step, t.exposed))
    figure = new_figure(6.5 * (3 if times else 2), 5)
    memory, wire, *clock = figure.subplots(1, 3 if times else 2)
    _over_a_step(memory, first, limit)
    sent: dict[str, list[tuple[int, float, float]]] = {}
    for e in alike:
        sent.setdefault(e.strategy, []).append((e.ranks, e.sent / _GIB, 0.0))
    _lines(wire, sent)
    ranks = sorted({e.ranks for e in alike})
    dtype = subject.compute or torch.float32
    for name, parts, style in (("DDP", 2, ":"), ("FSDP2", 3, "--")):
        theirs = [parts * dtype.itemsize * first.parameters * (w - 1) / w / _GIB for w in ranks]
        label = f"{name} in {str(dtype).removeprefix('torch.')}"
        wire.plot(ranks, theirs, linestyle=style, color="grey", label=label)
    wire.set(title="sent in a step", ylabel="GiB from each rank")
    for axes in clock:
        _lines(axes, times)
        axes.set(title="time of a step, and what of it is exposed", ylabel="seconds")
    for axes in (wire, *clock):
        axes.set(xlabel="ranks", xscale="log", ylim=(0, None))
        axes.set_xticks(ranks, labels=[f"{w:,}" for w in ranks])
        axes.minorticks_off()
        axes.legend()
    figure.suptitle(subject.name)
    figure.savefig(path)


def _over_a_step(axes: Axes, first: Estimate, limit: float | None) -> None:
    steps = [at for at, _ in first.course]
    axes.stackplot(steps, [[kinds[k] / _GIB for _, kinds in first.course] for k in KINDS], labels=KINDS)
    if limit is not None:
        axes.axhline(limit / _GIB, color="black", linestyle="--", label="the device's memory")
    axes.set(
        title=f"{first.strategy}, {first.ranks} ranks, batch {first.batch}",
        xlabel="operations of a step",
        ylabel="GiB on the fullest rank",
        ylim=(0, None),
    )
    axes.legend(loc="upper left")


def _lines(axes: Axes, series: Mapping[str, Points]) -> None:
    """Draws a line for each; the first ones are wide, so that none that lies on them hides them."""
    ours = iter(range(10))
    for k, ((name, points), marker) in enumerate(zip(series.items(), cycle(_MARKERS), strict=False)):
        ranks, values, parts = zip(*points, strict=True)
        width = 1 + 2 * (len(series) - 1 - k)
        color = "grey" if name == "FSDP2" else f"C{next(ours)}"  # the same in each picture
        axes.plot(
            ranks, values, marker=marker, linewidth=width, markersize=4 + width, label=name, color=color
        )
        if any(parts):
            below = [value - part for value, part in zip(values, parts, strict=True)]
            axes.fill_between(ranks, below, values, alpha=0.3, color=color, label=f"{name}, exposed")
