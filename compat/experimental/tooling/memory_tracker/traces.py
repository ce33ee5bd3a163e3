"""Records of a tracker: memory after forwards and backwards of layers, in bytes."""

from __future__ import annotations

import importlib
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

from shardkit.types import SavedState, StateDict


class TraceForwardEvent(NamedTuple):
    """Records what a layer's forward did, in bytes: to the memory in use, and by its outputs."""

    memory_diff: int
    memory_activations: int

    def to_dict(self) -> StateDict:
        """For JSON."""
        return self._asdict()

    @classmethod
    def from_dict(cls, serialized: SavedState) -> TraceForwardEvent:
        """The reverse of :meth:`to_dict`."""
        return cls(**serialized)


class TraceBackwardEvent(NamedTuple):
    """Bytes of the gradients that a layer's backward hands on."""

    memory_activations: int

    def to_dict(self) -> StateDict:
        """For JSON."""
        return self._asdict()

    @classmethod
    def from_dict(cls, serialized: SavedState) -> TraceBackwardEvent:
        """The reverse of :meth:`to_dict`."""
        return cls(**serialized)


class LayerMemoryTrace(NamedTuple):
    """Memory right after a layer's forward or backward, in bytes.

    Attributes:
        module_name: the layer.
        module_params: of its parameters.
        allocated: in use.
        reserved: held by the allocator.
        is_forward: forward, not backward.
        all_gathered: gathered by FSDP since the trace before.
        cumul_all_gathered: gathered by the FSDP units that are in their forward.
        event: more.
    """

    module_name: str
    module_params: int
    allocated: int
    reserved: int
    is_forward: bool
    all_gathered: int
    cumul_all_gathered: int
    event: TraceForwardEvent | TraceBackwardEvent

    def to_dict(self) -> StateDict:
        """For JSON."""
        return {**self._asdict(), "event": self.event._asdict()}

    @classmethod
    def from_dict(cls, serialized: SavedState) -> LayerMemoryTrace:
        """The reverse of :meth:`to_dict`."""
        event = TraceForwardEvent if serialized["is_forward"] else TraceBackwardEvent
        return cls(**{**serialized, "event": event.from_dict(serialized["event"])})


@dataclass
class LayerwiseMemoryTrackerSummary:
    """Peaks, sums over the forwards of all layers, and the layers with the largest outputs."""

    max_memory_allocated: int
    max_memory_cached: int
    total_activation_allocations: int
    total_forward_allocations: int
    top_forward_activation_producers: list[LayerMemoryTrace]


# ------------------------------------------------------------ where to checkpoint
def find_best_reset_points(activation_sizes: list[int], num_checkpoints: int) -> tuple[int, list[int]]:
    """Cuts layers into chunks so that the largest chunk is as small as can be.

    Args:
        activation_sizes: of the layers, in order.
        num_checkpoints: how many chunks; what is left after the last one is a further chunk.

    Returns:
        The size of the largest chunk, and where chunks end (the index after their last layer).
    """
    n = len(activation_sizes)
    sums = [0, *accumulate(activation_sizes)]
    # best[start] = (largest chunk, ends) of the layers from start on, with as many chunks as rounds so far
    best: list[tuple[int, list[int]]] = [*((sums[n] - sums[start], []) for start in range(n)), (0, [])]
    for _ in range(num_checkpoints):
        further: list[tuple[int, list[int]]] = []
        for start in range(n):
            options = (
                (max(sums[end] - sums[start], best[end][0]), [end, *best[end][1]])
                for end in range(start + 1, n + 1)
            )
            further.append(min(options, key=lambda option: option[0]))
        best = [*further, (0, [])]
    return best[0]


@dataclass
class SuggestedCheckpoints:
    """Largest activation memory, and names of the layers at which chunks begin."""

    max_memory: int
    split_modules: list[str]
    all_modules: list[str]


def suggest_checkpoint_location(
    traces: list[LayerMemoryTrace], num_checkpoints: int, num_skipped_layers: int = 0
) -> SuggestedCheckpoints:
    """Where to begin checkpointed blocks, from the first forward of each layer in the traces.

    Args:
        num_checkpoints: how many blocks.
        num_skipped_layers: so many layers at the beginning stay out of it.
    """
    sizes: dict[str, int] = {}
    for trace in traces:
        if trace.is_forward:
            sizes.setdefault(trace.module_name, trace.event.memory_activations)
    names = list(sizes)[num_skipped_layers:]
    largest, ends = find_best_reset_points([sizes[name] for name in names], num_checkpoints)
    return SuggestedCheckpoints(
        max_memory=largest,
        split_modules=[names[end] for end in ends if end < len(names)],
        all_modules=names,
    )


# ------------------------------------------------------------ pictures
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
