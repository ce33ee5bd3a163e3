"""Ranges have names in profiles, and cost nothing where nobody listens."""

from __future__ import annotations

import gc

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import shardkit
from shardkit.tracing import ranges
from shardkit.tracing.ranges import Heard, Phase, Ranges, What, leave
from tests.figures.counters import CallCounter
from tests.pools import on_ranks
from tests.tracing.trainings import sharded


def test_a_range_that_nobody_hears_of_is_no_python_call() -> None:
    of_unit = Ranges("layers.1", (0, 1))
    with CallCounter() as calls:
        with of_unit.gather():
            entered = of_unit.forward()
            entered.__enter__()
            entered.__exit__(None, None, None)
    assert calls.calls == 0


class _Listener:
    mark = None

    def __init__(self) -> None:
        self.found: list[What] = []

    def on_range(self, what: What, start: int, end: int, marks: object) -> None:
        assert start <= end
        self.found.append(what)

    def on_number(self, name: str, value: torch.Tensor) -> None: ...


def test_listeners_hear_of_what_was_there_and_of_what_comes_and_leave_nothing_behind() -> None:
    before, listener = Ranges("a", (0, 1), gather=8), _Listener()
    ranges.listen(listener)
    after = Ranges("b")
    try:
        assert ranges.listening
        with before.gather(), after.reshard():
            pass
        left = after.forward()
        left.__enter__()
        leave(left)
        leave(left)  # twice does no harm
    finally:
        ranges.stop_listening(listener)
    assert not ranges.listening
    assert listener.found == [What("reshard", "b"), What("all_gather", "a", (0, 1), 8), What("forward", "b")]
    assert [type(opens()) for opens in (before.gather, after.reshard)] == [Phase, Phase]
    for _ in range(2):  # what other tests have left, finalizers and all
        gc.collect()
    count = len(ranges._objects)
    del before, after
    gc.collect()
    assert len(ranges._objects) == count - 2


def test_a_profiler_may_start_and_end_inside_of_a_range() -> None:
    for opens in (Ranges("a").forward, lambda: Heard(What("forward", "a"))):
        entered = opens()
        entered.__enter__()
        with profile(activities=[ProfilerActivity.CPU]):
            leave(entered)
            inside = opens()
            inside.__enter__()
        leave(inside)


NAMES = {
    "fsdp": (
        "forward(layers.2)", "all_gather(layers.2)", "all_gather.wait(layers.2)", "reshard(layers.2)",
        "backward(layers.2)", "reduce_scatter(layers.2)", "reduce_scatter.wait(layers.2)", "backward.end(root)",
        "clip(gradients)", "norm.wait(gradients)",
    ),
    "sharded_ddp": (
        "forward(root)", "reduce_scatter(bucket 0)", "reduce_scatter.wait(bucket 0)", "backward.end(root)",
        "update(updated parameters)", "all_gather(updated parameters)", "all_gather.wait(updated parameters)",
        "clip(gradients)", "overflow.wait(gradients)",
    ),
}  # fmt: skip
NAMES["fully_shard"] = NAMES["dtensors"] = NAMES["fsdp"]


@pytest.mark.parametrize("way", NAMES)
@on_ranks(2)
def test_a_profile_has_the_names(rank: int, way: str) -> None:
    model, optimizer = sharded(way, "")
    scaler = shardkit.ShardedGradScaler(enabled=way == "sharded_ddp")
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(2):
            scaler.scale(model(torch.ones(4, 8)).sum()).backward()
            scaler.unscale_(optimizer)
            if isinstance(optimizer, shardkit.OSS):
                optimizer.clip_grad_norm(1.0)
            else:
                shardkit.sharding_of(model).clip_grad_norm_(1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    names = {event.name for event in profiler.events()}
    missing = [name for name in NAMES[way] if f"shardkit.{name}" not in names]
    assert not missing, sorted(name for name in names if "shardkit" in name)
