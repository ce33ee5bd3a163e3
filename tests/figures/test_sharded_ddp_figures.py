"""What OSS + ShardedDataParallel may cost per step on the GPT of :mod:`tests.figures.gpt` with AdamW, asserted.

Everything here is counted, so it holds on a busy machine too. ``python -m tests.figures.measure`` prints the figures.
"""

from __future__ import annotations

from statistics import mean

import pytest
import torch

from tests.figures.gpt import P, theory_peak, theory_resident, theory_sent
from tests.figures.measured import measured, needs_wire, of, over_bare, worlds

both = pytest.mark.parametrize("implementation", ["shardkit", "balanced"])


def test_the_counters_find_what_one_process_needs() -> None:
    """Parameters and AdamW's moments between steps, gradients on top within one; nothing is sent."""
    assert of(2, "bare", "sent") == [0, 0]
    assert of(2, "bare", "resident") == pytest.approx([3 * P, 3 * P], rel=2e-3)
    assert of(2, "bare", "peak") == pytest.approx([4 * P, 4 * P], rel=2e-3)


@worlds
@both
def test_bytes_sent(world_size: int, implementation: str) -> None:
    sent = of(world_size, implementation, "sent")
    assert mean(sent) <= 1.01 * theory_sent(world_size)
    assert max(sent) <= 1.08 * theory_sent(world_size)


@worlds
@both
def test_resident_bytes(world_size: int, implementation: str) -> None:
    resident = of(world_size, implementation, "resident")
    assert mean(resident) <= 1.03 * theory_resident(world_size)
    # fairscale's partition alone leaves 1.089 on a rank of four
    worst = 1.10 if (implementation, world_size) == ("shardkit", 4) else 1.08
    assert max(resident) <= worst * theory_resident(world_size)


@worlds
@both
def test_peak_bytes(world_size: int, implementation: str) -> None:
    peak = of(world_size, implementation, "peak")
    assert mean(peak) <= 1.15 * theory_peak(world_size)
    worst = 1.22 if (implementation, world_size) == ("shardkit", 4) else 1.15
    assert max(peak) <= worst * theory_peak(world_size)


@pytest.mark.parametrize(("world_size", "resident", "peak"), [(2, 2.02, 2.80), (4, 1.52, 2.30)])
def test_bytes_with_a_balanced_partition(world_size: int, resident: float, peak: float) -> None:
    assert max(of(world_size, "balanced", "resident")) <= resident * P
    assert max(of(world_size, "balanced", "peak")) <= peak * P


@worlds
@both
def test_dispatched_operations(world_size: int, implementation: str) -> None:
    assert over_bare(world_size, implementation, "operations") <= (76 if world_size == 2 else 150)


@worlds
@both
def test_operations_and_python_calls(world_size: int, implementation: str) -> None:
    assert max(of(world_size, implementation, "operations")) <= (716 if world_size == 2 else 780)
    assert max(of(world_size, implementation, "calls")) <= (1000 if world_size == 2 else 1100)


@worlds
@both
def test_ranges_in_traces_cost_nobody_a_call_who_does_not_trace(world_size: int, implementation: str) -> None:
    assert of(world_size, implementation, "tracing") == [0] * world_size


@worlds
@both
def test_python_calls(world_size: int, implementation: str) -> None:
    assert over_bare(world_size, implementation, "calls") <= 600


@worlds
@both
def test_bytes_on_the_wire_of_a_step(world_size: int, implementation: str) -> None:
    """Headers of packets are all that comes on top."""
    needs_wire(world_size)
    assert of(world_size, implementation, "wire")[0] <= 1.01 * theory_sent(world_size)


@worlds
@pytest.mark.parametrize("sizes", ["even", "uneven", "small"])
def test_bytes_on_the_wire_of_each_collective(world_size: int, sizes: str) -> None:
    """N (W-1)/W for a reduce-scatter and for an all-gather of N bytes."""
    needs_wire(world_size)
    for name, ratio in measured(world_size)["collectives"][sizes].items():
        assert 0.99 <= ratio <= (1.15 if sizes == "small" else 1.01), name


def test_nothing_grows_over_fifty_steps() -> None:
    for rank in measured(2)["growth"]["shardkit"]:
        assert rank["bytes"] == 0
        assert rank["objects"] <= 10


def test_memory_counter_sees_other_threads_and_resized_storages() -> None:
    from tests.figures.counters import memory_of

    def step(held: list[torch.Tensor], count: int) -> None:
        held[0].untyped_storage().resize_(4 << 20)
        torch.empty(2 << 20)
        held[0].untyped_storage().resize_(1 << 20)

    memory = memory_of(lambda: [torch.empty(1 << 20)], step)
    assert memory.resident == pytest.approx(1 << 20, abs=4096)
    assert memory.peak == pytest.approx(12 << 20, abs=4096)
