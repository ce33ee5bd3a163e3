"""Memory layer by layer: counted bytes against bytes that follow from shapes."""

from __future__ import annotations

import copy
import gc
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from shardkit.experimental.tooling.layer_memory_tracker import (
    LayerwiseMemoryTracker,
    ProcessGroupTracker,
    ProcessGroupTrackingEvent,
    find_best_reset_points,
    null_context,
    suggest_checkpoint_location,
)
from shardkit.nn import FullyShardedDataParallel
from shardkit.torch_seams.tensors import LiveTensors
from tests.pools import on_ranks


def _tracked() -> tuple[LayerwiseMemoryTracker, nn.Module]:
    model = nn.Sequential(
        nn.Linear(8, 16, bias=False),
        nn.Unflatten(1, (1, 16)),
        nn.Sequential(nn.Linear(16, 4, bias=False), nn.Tanh()),
    )
    tracker = LayerwiseMemoryTracker()
    tracker.monitor(model)
    try:
        model(torch.randn(32, 8)).sum().backward()
    finally:
        tracker.stop()
    return tracker, model


def test_traces_are_what_shapes_say() -> None:
    tracker, model = _tracked()
    forwards, backwards = tracker.forward_traces, tracker.backward_traces
    assert [t.module_name for t in forwards] == ["0", "1", "2.0", "2.1"]
    assert [t.module_params for t in forwards] == [8 * 16 * 4, 0, 16 * 4 * 4, 0]
    # a view (Unflatten) needs no memory
    assert [t.event.memory_activations for t in forwards] == [32 * 16 * 4, 0, 32 * 4 * 4, 32 * 4 * 4]
    assert [t.event.memory_diff for t in forwards] == [32 * 16 * 4, 0, 32 * 4 * 4, 32 * 4 * 4]  # type: ignore[union-attr]
    params = sum(p.numel() * 4 for p in model.parameters())
    batch = 32 * 8 * 4
    assert forwards[-1].allocated == params + batch + 32 * 4 * (16 + 4 + 4)
    assert [t.module_name for t in backwards] == ["2.1", "2.0", "1", "0"]
    assert [t.event.memory_activations for t in backwards] == [32 * 4 * 4, 32 * 16 * 4, 32 * 16 * 4, 0]
    assert tracker.max_memory_allocated == tracker.max_memory_cached >= forwards[-1].allocated
    summary = tracker.summary
    assert summary.total_activation_allocations == summary.total_forward_allocations == 32 * 4 * (16 + 4 + 4)
    assert summary.top_forward_activation_producers[0].module_name == "0"


def test_after_stop_nothing_is_recorded() -> None:
    tracker, model = _tracked()
    count = len(tracker.memory_traces)
    model(torch.randn(2, 8)).sum().backward()
    assert len(tracker.memory_traces) == count
    tracker.clear_traces()
    assert tracker.memory_traces == []


def test_traces_survive_a_file(tmp_path: Path) -> None:
    tracker, _ = _tracked()
    tracker.save_traces(str(tmp_path / "traces.json"))
    assert LayerwiseMemoryTracker.load(str(tmp_path / "traces.json")).memory_traces == tracker.memory_traces


def test_live_tensors() -> None:
    with LiveTensors() as live:
        x = torch.zeros(100)
        view = x.view(10, 10)
        y = x + 1
        assert live.bytes == 800
        del x
        assert live.bytes == 800
        del view
        gc.collect()
        assert (live.bytes, live.peak) == (400, 800)
        del y
        assert live.bytes == 0


def _largest(sizes: list[int], ends: list[int]) -> int:
    borders = [0, *ends, len(sizes)]
    return max((sum(sizes[a:b]) for a, b in pairwise(borders)), default=0)


@settings(max_examples=50, deadline=None)
@given(sizes=st.lists(st.integers(0, 9), max_size=7), checkpoints=st.integers(0, 4))
def test_best_points_are_the_best_of_all(sizes: list[int], checkpoints: int) -> None:
    largest, ends = find_best_reset_points(sizes, checkpoints)
    assert len(ends) <= checkpoints
    assert largest == _largest(sizes, ends)
    every = (
        _largest(sizes, list(c))
        for n in range(checkpoints + 1)
        for c in combinations(range(1, len(sizes)), n)
    )
    assert largest == min(every, default=0)


def test_suggestions_name_layers() -> None:
    tracker, _ = _tracked()
    suggested = suggest_checkpoint_location(tracker.memory_traces, num_checkpoints=1)
    assert suggested.split_modules == ["1"]
    assert suggested.all_modules == ["0", "1", "2.0", "2.1"]
    assert suggested.max_memory == 32 * 16 * 4
    assert suggest_checkpoint_location(tracker.memory_traces, 1, num_skipped_layers=2).all_modules == [
        "2.0",
        "2.1",
    ]


def test_process_group_tracker_reports_gathers() -> None:
    class Group:
        def allgather(self, outputs: Any, inputs: Any, more: int) -> int:
            return more

        def size(self) -> int:
            return 2

    seen: list[Any] = []
    tracker = ProcessGroupTracker(Group(), lambda *event: seen.append(event))
    assert tracker.size() == 2
    assert tracker.allgather([1], [2], more=3) == 3
    assert seen == [(ProcessGroupTrackingEvent.allgather, [1], [2])]
    with pytest.raises(AttributeError):
        _ = tracker.nothing


@on_ranks(2)
def test_the_own_listener_of_a_tracker_hears_of_gathers(rank: int) -> None:
    """A unit's tracker hears of its gathers, each with all values and this rank's part; copies tell as well."""
    heard: list[tuple[torch.Size, torch.Size]] = []

    def listener(event: ProcessGroupTrackingEvent, output: torch.Tensor, shard: torch.Tensor) -> None:
        assert event is ProcessGroupTrackingEvent.allgather
        heard.append((output.shape, shard.shape))

    group = ProcessGroupTracker(torch.distributed.group.WORLD)
    inner = FullyShardedDataParallel(nn.Linear(4, 6, bias=False), process_group=group)
    model = FullyShardedDataParallel(nn.Sequential(inner, nn.Linear(6, 3, bias=False)))
    model(torch.ones(2, 4)).sum().backward()
    assert heard == []
    group.listener = listener
    for dtype in (torch.float, torch.double):  # the latter's shards are gathered in another way
        model.to(dtype)(torch.ones(2, 4, dtype=dtype)).sum().backward()
        model.zero_grad()
        with inner.summon_full_params():
            pass
    # in forward and summoned: what was called last stays gathered until backward; the root has no tracker
    assert heard == [((24,), (12,))] * 4
    twin = copy.deepcopy(inner)
    twin(torch.ones(2, 4, dtype=torch.double))
    assert len(heard) == 5


@on_ranks(2)
def test_gathers_of_fsdp_are_recorded(rank: int) -> None:
    units = [nn.Linear(4, 6, bias=False), nn.Linear(6, 2, bias=False)]
    group = ProcessGroupTracker(torch.distributed.group.WORLD)
    model = FullyShardedDataParallel(
        nn.Sequential(*[FullyShardedDataParallel(u, process_group=group) for u in units]), process_group=group
    )
    tracker = LayerwiseMemoryTracker()
    tracker.monitor(model)
    model(torch.ones(2, 4)).sum().backward()
    sizes = [4 * 6 * 4, 6 * 2 * 4]
    forwards, backwards = tracker.forward_traces, tracker.backward_traces
    assert len(forwards) == len(backwards) == 2
    assert sum(t.all_gathered for t in forwards) == sum(sizes)
    tracker.stop()
    tracker.clear_traces()
    model(torch.ones(2, 4)).sum().backward()
    assert tracker.memory_traces == []


def test_plots() -> None:
    matplotlib = pytest.importorskip("matplotlib")
    pytest.importorskip("PIL")
    matplotlib.use("agg")
    tracker, _ = _tracked()
    assert tracker.show_plots(figsize=(4, 5), capture=True).size == (400, 500)
    with null_context():
        pass
