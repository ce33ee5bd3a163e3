"""What a tracker records: memory after forwards and backwards of layers, in bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from shardkit.types import SavedState, StateDict


class TraceForwardEvent(NamedTuple):
    """What a layer's forward did, in bytes: to the memory in use, and by its outputs."""

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
