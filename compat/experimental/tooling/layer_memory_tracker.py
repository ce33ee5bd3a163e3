"""Memory of a step, layer by layer.

On an accelerator the numbers are those of torch's allocator; on the CPU, which keeps no count, those of the model and
of tensors that were made while it was monitored.
"""

from __future__ import annotations

import enum
import importlib
import io
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from shardkit.checkpoint.files.writing import write_atomically
from shardkit.errors import ConfigurationError, DamagedFileError
from shardkit.fsdp.state import state_of
from shardkit.torch_seams.tensors import LiveTensors
from shardkit.types import AnyCallable, ProcessGroup, SavedState, StateDict, Tree


@contextmanager
def null_context() -> Iterator[None]:
    yield


# ------------------------------------------------------------ traces, in bytes
class TraceForwardEvent(NamedTuple):
    """Records what a layer's forward did, in bytes: to the memory in use, and by its outputs."""

    memory_diff: int
    memory_activations: int

    def to_dict(self) -> StateDict:
        """Returns it as JSON takes it."""
        return self._asdict()

    @classmethod
    def from_dict(cls, serialized: SavedState) -> TraceForwardEvent:
        """Reverses :meth:`to_dict`."""
        return cls(**serialized)


class TraceBackwardEvent(NamedTuple):
    """Bytes of the gradients that a layer's backward hands on."""

    memory_activations: int

    def to_dict(self) -> StateDict:
        """Returns it as JSON takes it."""
        return self._asdict()

    @classmethod
    def from_dict(cls, serialized: SavedState) -> TraceBackwardEvent:
        """Reverses :meth:`to_dict`."""
        return cls(**serialized)


class LayerMemoryTrace(NamedTuple):
    """Memory right after a layer's forward or backward, in bytes.

    Attributes:
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
        """Returns it as JSON takes it."""
        return {**self._asdict(), "event": self.event._asdict()}

    @classmethod
    def from_dict(cls, serialized: SavedState) -> LayerMemoryTrace:
        """Reverses :meth:`to_dict`."""
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
    """Suggests where to begin checkpointed blocks, from the first forward of each layer in the traces.

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
    """Draws six plots of the memory over the traces, solid in forwards and dotted in backwards; needs matplotlib.

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
    """Returns a Pillow image (RGB) of a figure."""
    fig.savefig(buffer := io.BytesIO())
    buffer.seek(0)
    return importlib.import_module("PIL.Image").open(buffer).convert("RGB")


# ------------------------------------------------------------ the tracker
class ProcessGroupTrackingEvent(enum.Enum):
    """Calls of a process group that are reported."""

    allgather = enum.auto()


class ProcessGroupTracker:
    """A process group that reports all-gathers to a listener, ``listener(event, outputs, inputs)``.

    All-gathers of FSDP's parameters, which go over connections of FSDP's own, are reported as well.

    Args:
        group: the process group; what is not reported goes to it.
    """

    def __init__(self, group: ProcessGroup, listener: AnyCallable | None = None) -> None:
        self.group = group
        self.listener = listener

    def __getattr__(self, item: str) -> Any:
        found = getattr(self.__dict__["group"], item)
        if item in ("allgather", "_allgather_base", "all_gather_into"):
            return partial(self._call, found)
        return found

    def hear_of_gathering(self, outputs: Tree, inputs: Tree) -> None:
        """Reports an all-gather; whoever has this object as its group calls it."""
        if self.listener is not None:
            self.listener(ProcessGroupTrackingEvent.allgather, outputs, inputs)

    def _call(self, function: AnyCallable, outputs: Tree, inputs: Tree, *args: Tree, **kwargs: Tree) -> Tree:
        self.hear_of_gathering(outputs, inputs)
        return function(outputs, inputs, *args, **kwargs)


def _checksum(traces: list[StateDict]) -> int:
    return zlib.crc32(json.dumps(traces).encode())


def _size(tensors: Tree) -> int:
    """Counts bytes of the tensors in any nesting of containers."""
    return sum(t.numel() * t.element_size() for t in tree_leaves(tensors) if isinstance(t, torch.Tensor))


class LayerwiseMemoryTracker:
    """Records the memory in use after forward and backward of each innermost layer::

        tracker = LayerwiseMemoryTracker()
        tracker.monitor(model)
        criterion(model(inputs), target).backward()
        print(tracker.summary)
        tracker.stop()

    All-gathers of FSDP units are recorded as well. (fairscale needs a :class:`ProcessGroupTracker` as their
    ``process_group`` for that; here it may be one.) Memory that FSDP takes and releases is in use on accelerators; the
    CPU's count has none of it.

    Attributes:
        memory_traces: all traces, in order.
    """

    def __init__(self) -> None:
        self.memory_traces: list[LayerMemoryTrace] = []
        self._hooks: list[RemovableHandle] = []
        self._channels: list[Any] = []  # over which FSDP units gather
        self._live: LiveTensors | None = None
        self._device = torch.device("cpu")
        self._entered: str | None = None  # the module whose forward began last
        self._before = 0
        self._gathered = 0
        self._gathered_by_unit: list[int] = []

    def monitor(self, model: nn.Module) -> None:
        """Begins; on a CPU all operations of this thread are counted until :meth:`stop`.

        Raises:
            ConfigurationError: the model's device keeps no count of its memory.
        """
        self.stop()
        tensors = [*model.parameters(), *model.buffers()]
        self._device = next((t.device for t in tensors), torch.device("cpu"))
        accelerator = torch.accelerator.current_accelerator()
        if self._device.type == "cpu":
            self._live = LiveTensors()
            self._live.add(tensors)
            self._live.__enter__()
        elif accelerator is None or accelerator.type != self._device.type:
            raise ConfigurationError(
                f"memory in use on {self._device} can't be read; move the model elsewhere"
            )
        for name, module in model.named_modules():
            self._hooks += [
                module.register_forward_pre_hook(partial(self._before_forward, name)),
                module.register_forward_hook(partial(self._after_forward, name)),
            ]
            state = state_of(module)
            if state is None or state.group.world_size == 1:
                continue
            channel: Any = state.group.channel("parameters")
            if channel not in self._channels:
                self._channels.append(channel)
                channel.all_gather_into = ProcessGroupTracker(channel, self._on_group_call).all_gather_into

    def stop(self) -> None:
        """Ends; traces stay."""
        for handle in self._hooks:
            handle.remove()
        self._hooks.clear()
        for channel in self._channels:
            del channel.all_gather_into
        self._channels.clear()
        if self._live is not None:
            self._live.__exit__(None, None, None)
            self._live = None
        self._entered, self._before, self._gathered = None, 0, 0
        self._gathered_by_unit.clear()

    def clear_traces(self) -> None:
        """Forgets all traces."""
        self.memory_traces.clear()

    forward_traces = property(lambda self: [t for t in self.memory_traces if t.is_forward])
    backward_traces = property(lambda self: [t for t in self.memory_traces if not t.is_forward])

    @property
    def max_memory_allocated(self) -> int:
        """Counts the most bytes in use at a trace."""
        return max(t.allocated for t in self.memory_traces)

    @property
    def max_memory_cached(self) -> int:
        """Counts the most bytes held by the allocator at a trace."""
        return max(t.reserved for t in self.memory_traces)

    @property
    def summary(self) -> LayerwiseMemoryTrackerSummary:
        events = [t.event for t in self.forward_traces]
        return LayerwiseMemoryTrackerSummary(
            max_memory_allocated=self.max_memory_allocated,
            max_memory_cached=self.max_memory_cached,
            total_activation_allocations=sum(e.memory_activations for e in events),
            total_forward_allocations=sum(e.memory_diff for e in events if isinstance(e, TraceForwardEvent)),
            top_forward_activation_producers=self.top_forward_activation_producers(),
        )

    def top_forward_activation_producers(self, top: int = 10) -> list[LayerMemoryTrace]:
        """Returns the forwards with the largest outputs."""
        return sorted(self.forward_traces, key=lambda t: t.event.memory_activations, reverse=True)[:top]

    def show_plots(self, figsize: tuple[int, int] = (16, 20), capture: bool = False) -> Any:
        """Plots this run alone, as :func:`compare_memory_traces_in_plot` does."""
        return compare_memory_traces_in_plot({"run": self.memory_traces}, figsize=figsize, capture=capture)

    def save_traces(self, path: str) -> None:
        """Writes the traces as JSON, with a checksum."""
        traces = [t.to_dict() for t in self.memory_traces]
        with write_atomically(path) as file:
            file.write(json.dumps({"traces": traces, "crc32": _checksum(traces)}).encode())

    @classmethod
    def load(cls, path: str) -> LayerwiseMemoryTracker:
        """Returns a tracker with the traces of a file.

        Raises:
            DamagedFileError: they are not what was written. Files without a checksum, fairscale's, can't be compared.
        """
        tracker = cls()
        try:
            found = json.loads(Path(path).read_bytes())
            if found.get("crc32", _checksum(found["traces"])) != _checksum(found["traces"]):
                raise ValueError("the checksum differs")
            tracker.memory_traces = [LayerMemoryTrace.from_dict(t) for t in found["traces"]]
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            raise DamagedFileError(f"{path} has no traces, or was damaged: {error}") from error
        return tracker

    # -------------------------------------------------------------------------------------- hooks
    def _memory(self) -> tuple[int, int]:
        """Counts bytes in use, and bytes held."""
        if self._live is not None:
            return self._live.bytes, self._live.bytes
        memory, device = torch.accelerator, self._device
        return memory.memory_allocated(device), memory.memory_reserved(device)

    def _before_forward(self, name: str, module: nn.Module, inputs: Tree) -> None:
        self._entered = name
        self._before, _ = self._memory()
        if state_of(module) is not None:
            self._gathered_by_unit.append(0)

    def _after_forward(self, name: str, module: nn.Module, inputs: Tree, outputs: Tree) -> None:
        if state_of(module) is not None:
            self._gathered_by_unit.pop()
        if self._entered == name:  # no other module ran inside of it
            allocated, _ = self._memory()
            old = {t.untyped_storage().data_ptr() for t in tree_leaves(inputs) if isinstance(t, torch.Tensor)}
            found = [t for t in tree_leaves(outputs) if isinstance(t, torch.Tensor)]
            made = [t for t in found if t.untyped_storage().data_ptr() not in old]  # not views of inputs
            event = TraceForwardEvent(allocated - self._before, _size(made))
            self._trace(name, module, sum(self._gathered_by_unit), event)
            self._watch_backward(name, module, inputs, outputs)
        self._entered = None

    def _watch_backward(self, name: str, module: nn.Module, inputs: Tree, outputs: Tree) -> None:
        """Traces the layer's backward when the gradient of an input is there; where none is made, when it began."""

        def on_gradient(gradient: torch.Tensor | None, *_: object) -> None:
            self._trace(name, module, 0, TraceBackwardEvent(_size(gradient)))

        def first(tensors: Tree) -> torch.Tensor | None:
            found = (t for t in tree_leaves(tensors) if isinstance(t, torch.Tensor) and t.requires_grad)
            return next(found, None)

        received, made = first(inputs), first(outputs)
        if received is not None:
            self._hooks.append(received.register_hook(on_gradient))
        elif made is not None and made.grad_fn is not None:
            self._hooks.append(made.grad_fn.register_hook(lambda *_: on_gradient(None)))

    def _trace(
        self, name: str, module: nn.Module, in_forward: int, event: TraceForwardEvent | TraceBackwardEvent
    ) -> None:
        allocated, reserved = self._memory()
        self.memory_traces.append(
            LayerMemoryTrace(
                module_name=name,
                module_params=_size(list(module.parameters())),
                allocated=allocated,
                reserved=reserved,
                is_forward=isinstance(event, TraceForwardEvent),
                all_gathered=self._gathered,
                cumul_all_gathered=in_forward,
                event=event,
            )
        )
        self._gathered = 0

    def _on_group_call(self, event: ProcessGroupTrackingEvent, *args: object) -> None:
        outputs, _ = args
        self._gathered += _size(outputs)
        if self._gathered_by_unit:
            self._gathered_by_unit[-1] += _size(outputs)
