"""A picture of a step: what each rank does when, and what it waits for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import ConfigurationError
from ...tracing.timeline import Activity, Trace

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLOURS = {
    "forward": "#4e79a7",
    "loss": "#9c755f",
    "backward": "#f28e2b",
    "recomputation": "#b07aa1",
    "end of backward": "#ffbe7d",
    "step": "#59a14f",
    "data": "#edc948",
    "between steps": "#d9d9d9",
    "waits": "#e15759",
}
_SAME = {"update": "step", "backward.end": "end of backward", "clip": "step"}


def new_figure(width: float, height: float) -> Figure:
    """Returns an empty picture, in inches."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigurationError("plots need matplotlib: pip install matplotlib") from error
    return Figure(figsize=(width, height), layout="constrained")


def plot(trace: Trace, path: str | Path, step: int | None = None) -> None:
    """Writes a picture (SVG, PNG or PDF, by the file's name) of one step; a row for each rank, named by unit."""
    start, end = _time_of(trace, step)
    figure = new_figure(13, 1.6 + 0.9 * len(trace.ranks))
    from matplotlib.patches import Patch

    axes = figure.subplots()
    used: dict[str, str] = {}
    for row, rank in enumerate(trace.ranks.values()):
        for left, right, kind, label in _pieces(rank.moments, start, end):
            used[kind] = _COLOURS[kind]
            axes.broken_barh(
                [((left - start) / 1e3, (right - left) / 1e3)],
                (row - 0.4, 0.8),
                color=used[kind],
                hatch="///" if kind == "waits" else None,
                edgecolor="white",
                linewidth=0.3,
            )
            if right - left > 0.02 * (end - start):
                axes.text(
                    ((left + right) / 2 - start) / 1e3,
                    row,
                    label,
                    ha="center",
                    va="center",
                    fontsize=7,
                    clip_on=True,
                    rotation=90 if right - left < 0.08 * (end - start) else 0,
                )
    axes.set(
        yticks=range(len(trace.ranks)),
        yticklabels=[f"rank {number}" for number in trace.ranks],
        xlabel="ms",
        xlim=(0, (end - start) / 1e3),
        ylim=(len(trace.ranks) - 0.5, -0.5),
    )
    handles = [Patch(color=used[kind], label=kind) for kind in _COLOURS if kind in used]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), frameon=False)
    figure.savefig(path)


def _pieces(moments: Sequence[Activity], start: float, end: float) -> Iterator[tuple[float, float, str, str]]:
    """Yields start, end, kind and label; moments of one kind and unit that follow each other are one."""
    for (kind, label), group in groupby(moments, key=_shown):
        alike = list(group)
        left, right = max(alike[0].start, start), min(alike[-1].end, end)
        if right > left:
            yield left, right, kind, label


def _time_of(trace: Trace, step: int | None) -> tuple[float, float]:
    steps = {number for rank in trace.ranks.values() for number, _, _ in rank.steps}
    if not steps:
        return min(r.start for r in trace.ranks.values()), max(r.end for r in trace.ranks.values())
    step = max(steps) if step is None else step
    if step not in steps:
        raise ConfigurationError(f"there is no step {step} in this trace; it has {sorted(steps)}")
    times = [(a, b) for rank in trace.ranks.values() for number, a, b in rank.steps if number == step]
    return min(a for a, _ in times), max(b for _, b in times)


def _shown(moment: Activity) -> tuple[str, str]:
    """Returns kind and label."""
    if moment.wait:
        return "waits", moment.wait.replace("(", "\n").rstrip(")")
    phase, unit = moment.place
    kind = _SAME.get(phase, phase)
    return kind if kind in _COLOURS else "between steps", unit or phase
