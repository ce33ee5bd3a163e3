"""Traces as plots; needs matplotlib, and Pillow for images."""

from __future__ import annotations

import importlib
import io
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

from .traces import LayerMemoryTrace


def compare_memory_traces_in_plot(
    memory_traces_by_job: dict[str, list[LayerMemoryTrace]],
    figsize: tuple[int, int] = (16, 20),
    capture: bool = False,
) -> Any:
    """Six plots of the memory over the traces, solid in forwards and dotted in backwards; needs matplotlib.

    Args:
        memory_traces_by_job: traces by the name of their run.
        capture: return an image (needs Pillow), do not show it.
    """
    plt: Any = importlib.import_module("matplotlib.pyplot")

    fig, axes = plt.subplots(figsize=figsize, ncols=2, nrows=3)
    for axis, (title, of_trace, summed) in zip(axes.flat, _PLOTS, strict=True):
        axis.set_title(title)
        axis.ticklabel_format(axis="y", style="sci", scilimits=(9, 9))
        for job, traces in memory_traces_by_job.items():
            _plot(axis, job, traces, of_trace, summed)
        if len(memory_traces_by_job) > 1:
            axis.legend()
    if capture:
        image = matplotlib_figure_to_image(fig)
        plt.close(fig)
        return image
    plt.show()
    return None


# title, what of a trace, whether it adds up over forwards
_PLOTS: Sequence[tuple[str, Callable[[LayerMemoryTrace], int], bool]] = (
    ("memory allocated", lambda t: t.allocated, False),
    ("memory reserved", lambda t: t.reserved, False),
    ("activation allocations", lambda t: t.event.memory_activations, False),
    ("cumulative forward activations", lambda t: t.event.memory_activations, True),
    ("all gathered memory", lambda t: t.all_gathered, False),
    ("parameter memory", lambda t: t.module_params, False),
)


def _plot(
    axis: Any,
    job: str,
    traces: list[LayerMemoryTrace],
    of_trace: Callable[[LayerMemoryTrace], int],
    summed: bool,
) -> None:
    forwards = [(i, of_trace(t)) for i, t in enumerate(traces) if t.is_forward]
    backwards = [(i, of_trace(t)) for i, t in enumerate(traces) if not t.is_forward and not summed]
    if summed:
        places = [i for i, _ in forwards]
        forwards = list(zip(places, accumulate(value for _, value in forwards), strict=True))
    (line,) = axis.plot(*zip(*forwards, strict=True), label=job) if forwards else axis.plot([], label=job)
    if backwards:
        axis.plot(*zip(*backwards, strict=True), linestyle=":", color=line.get_color())
    if traces:
        place, top = max(enumerate(traces), key=lambda item: of_trace(item[1]))
        phase = "fwd" if top.is_forward else "bwd"
        axis.annotate(f"{top.module_name} ({phase})", (place, of_trace(top)))


def matplotlib_figure_to_image(fig: Any) -> Any:
    """A Pillow image (RGB) of a figure."""
    fig.savefig(buffer := io.BytesIO())
    buffer.seek(0)
    return importlib.import_module("PIL.Image").open(buffer).convert("RGB")
