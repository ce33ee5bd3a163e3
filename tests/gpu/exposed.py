"""How long the device communicates while it does nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

Interval = tuple[float, float]  # begin, end


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same times in ascending order, without overlaps."""
    joined: list[Interval] = []
    for begin, end in sorted(intervals):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return joined


def length(intervals: Iterable[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)


class Communication(NamedTuple):
    """Seconds of communication in all, and of it those in which nothing is computed."""

    whole: float
    exposed: float


def communication(communicating: Sequence[Interval], computing: Sequence[Interval]) -> Communication:
    """Of one device; units are the intervals'."""
    sent, computed = union(communicating), union(computing)
    both = length(union([*sent, *computed]))
    return Communication(length(sent), both - length(computed))


def of_profile(profiler: torch.profiler.profile, steps: int) -> Communication:
    """Seconds a step, from the device's own events."""
    assert profiler.profiler is not None
    sent: list[Interval] = []
    computed: list[Interval] = []
    event: Any
    for event in profiler.profiler.kineto_results.events():
        # "gpu_user_annotation" repeats what the host has named; its time is covered by kernels
        if event.device_type() != torch.autograd.DeviceType.CUDA or event.is_user_annotation():
            continue
        kind = sent if "nccl" in event.name().lower() else computed
        kind.append((event.start_ns() / 1e9, (event.start_ns() + event.duration_ns()) / 1e9))
    whole, exposed = communication(sent, computed)
    return Communication(whole / steps, exposed / steps)
