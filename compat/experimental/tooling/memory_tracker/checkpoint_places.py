"""At which layers to begin checkpointed blocks."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from .traces import LayerMemoryTrace


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
