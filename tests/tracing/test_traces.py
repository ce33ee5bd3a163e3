"""One file for all ranks, and what it tells."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

import shardkit
from shardkit.backend import backend_of_job
from shardkit.errors import ConfigurationError, DamagedFileError, RankMismatchError
from shardkit.tools.trace import advice, analyse
from shardkit.tracing import timeline, tracer
from shardkit.tracing.timeline import ClockReading, compare_clocks, of_events, on_rank_0, read_events
from shardkit.tracing.tracer import read_plan
from tests.figures.counters import CallCounter
from tests.pools import on_ranks, rank_pool
from tests.tracing.trainings import SLOW, sharded, train

PHASES = {
    "forward": ("forward", "layers.2"),
    "backward": ("backward", "layers.2"),
    "data": ("data", "DataLoader"),
    "step": ("step", "WholeParameters"),
}


@pytest.mark.parametrize(
    ("backend", "way", "slow"),
    [
        *(("gloo", "fsdp", slow) for slow in PHASES if slow != "step"),
        ("gloo", "whole", "step"),
        ("gloo", "fully_shard", "forward"),
        ("gloo", "sharded_ddp", "forward"),
        ("gloo", "sharded_ddp", "backward"),
        ("simulated", "fully_shard", "forward"),
        ("simulated", "fsdp", "data"),
    ],
)
def test_what_makes_a_rank_late_is_named(tmp_path: Path, backend: str, way: str, slow: str) -> None:
    path = tmp_path / "trace.json"
    rank_pool(2, backend).run(train, way, slow, 3, str(path), range(1, 3))
    check_file(json.loads(path.read_text()), ranks=2, steps=[1, 2])
    found = analyse(of_events(read_events([path])))
    first = found.late[0]
    assert (first.rank, *first.place) == (1, *PHASES[slow])
    assert first.total_us > 0.6e6 * 2 * SLOW
    change = next(a.change for a in advice(found) if a.found.startswith("rank 1 takes"))
    assert ("cost=" in change, "partition" in change) == (slow == "step", False)
    if backend == "gloo":  # others may use the machine: rank 0 is late too, now and then
        assert found.exposed_us[0] > 0.25e6 * SLOW
        assert found.waiting_us[0] > 0.25e6 * SLOW
    assert found.steps == 2
    assert all(f"layers.{k}" in found.units for k in range(4))


def check_file(trace: dict[str, Any], ranks: int, steps: list[int]) -> None:
    """Ranges of a track nest, flows have a beginning and an end inside of ranges, and what begins ends."""
    events = trace["traceEvents"]
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for e in events:
        if e["ph"] == "X":
            assert e["dur"] >= 0
            assert e["ts"] >= 0 or e["cat"] == "steps"
            tracks[e["pid"], e["tid"]].append((e["ts"], e["ts"] + e["dur"]))
    assert {pid for pid, _ in tracks} == set(range(ranks))
    for track in tracks.values():
        around: list[float] = []
        for start, end in sorted(track, key=lambda s: (s[0], -s[1])):
            while around and around[-1] <= start + 0.002:  # times are rounded to a thousandth
                around.pop()
            assert not around or end <= around[-1] + 0.002
            around.append(end)
    for rank in range(ranks):
        assert [
            e["args"]["step"] for e in events if e["ph"] == "X" and e["cat"] == "steps" and e["pid"] == rank
        ] == steps
    flows: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for e in events:
        if e["ph"] in "stf":
            flows[e["id"]].append(e)
            assert any(a <= e["ts"] <= b for a, b in tracks[e["pid"], e["tid"]])
    assert flows
    for flow in flows.values():
        assert [e["ph"] for e in flow] == ["s", *["t"] * (ranks - 2), "f"]
        assert {e["pid"] for e in flow} == set(range(ranks))
        assert [e["ts"] for e in flow] == sorted(e["ts"] for e in flow)
    begun = [e["id"] for e in events if e["ph"] == "b"]
    assert begun
    assert sorted(begun) == sorted(e["id"] for e in events if e["ph"] == "e")


# ------------------------------------------------------------ clocks
@on_ranks(3)
def test_clocks_that_differ_are_found_out(rank: int) -> None:
    before, ahead = timeline.now, rank * 3_000_000_000
    timeline.now = lambda: before() + ahead
    try:
        reading = compare_clocks(backend_of_job().group(None))
    finally:
        timeline.now = before
    assert abs(reading.ahead - ahead) <= reading.error
    assert reading.error < 50e6


def test_clocks_that_drift_are_followed_between_readings() -> None:
    readings = [ClockReading(1000, 100.0, 1.0), ClockReading(3000, 300.0, 1.0)]
    assert [on_rank_0(t, readings) for t in (1000, 2000, 3000)] == [900, 1800, 2700]
    assert on_rank_0(2000, [ClockReading(1000, 100.0, 60.0), ClockReading(3000, 120.0, 10.0)]) == 1880


# ------------------------------------------------------------ how a trace begins and ends
def _by_environment(rank: int, folder: str) -> list[bool]:
    os.environ["SHARDKIT_TRACE"] = f"steps=1:1,dir={folder}"
    try:
        train(rank, "sharded_ddp", "", 3, None)
    finally:
        del os.environ["SHARDKIT_TRACE"]
    return [not tracer._watches, tracer._patched == []]


def test_the_environment_begins_a_trace(tmp_path: Path) -> None:
    assert rank_pool(2).run(_by_environment, str(tmp_path)) == [[True, True]] * 2
    assert analyse(of_events(read_events([tmp_path]))).steps == 1


def _failing(rank: int, folder: str) -> None:
    model, optimizer = sharded("fsdp", "")
    try:
        with shardkit.trace(f"{folder}/t.json"):
            for batch in range(3):
                model(torch.full((2, 8), float(batch))).sum().backward()
                optimizer.step()
            raise KeyError("over")
    except KeyError:
        pass


def test_an_error_leaves_parts_that_can_be_put_together(tmp_path: Path) -> None:
    rank_pool(2).run(_failing, str(tmp_path))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["t.rank-0.json", "t.rank-1.json"]
    assert analyse(of_events(read_events([tmp_path]))).steps == 3


def test_what_is_no_trace_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{}")
    (tmp_path / "b.rank-0.json").write_text("[1]")
    for path in (tmp_path / "a.json", tmp_path / "b.rank-0.json"):
        with pytest.raises(DamagedFileError, match="no "):
            read_events([path])
    with pytest.raises(ConfigurationError, match="SHARDKIT_TRACE"):
        read_plan("steps=4:2")
    assert read_plan("steps=10:12,dir=a/b") == (range(10, 13), Path("a/b"))  # LAST is one of them


@on_ranks(2)
def test_ranks_that_trace_different_steps_hear_of_it(rank: int) -> None:
    wrong: list[tuple[Any, Any, str]] = [
        ("never.json", range(4, 4), r"range\(10, 12\)"),
        ("never.json", range(1 + rank), r"rank 0: \[0, 1\]; rank 1: \[0, 2\]"),
        (f"{__file__}/trace.json", None, "rank 0 can't write"),
    ]
    for path, steps, text in wrong:
        with pytest.raises((ConfigurationError, RankMismatchError), match=text):
            with shardkit.trace(path, steps=steps):
                pass
    assert not Path("never.json").exists()


# ------------------------------------------------------------ devices, and afterwards
class _Timer:
    """Of a device on which everything takes a millisecond more than on the host."""

    def __init__(self) -> None:
        self._marks = 0

    def mark(self) -> tuple[int, int]:
        self._marks += 1
        return timeline.now(), self._marks

    def seconds(self, first: Any, second: Any) -> float:
        return (second[0] - first[0]) / 1e9 + (second[1] - first[1]) * 1e-3


def _with_timer(rank: int, path: str) -> list[dict[str, float]]:
    backend = backend_of_job()
    found: list[dict[str, float]] = []
    backend.timer = _Timer  # type: ignore[method-assign]
    try:
        with shardkit.Metrics(found.append) as metrics:
            train(rank, "fsdp", "", 2, path, range(1, 2))
            metrics.step()
    finally:
        del backend.timer
    return found


def test_devices_have_a_track_and_waits_last_as_long_as_on_the_device(tmp_path: Path) -> None:
    written, _ = rank_pool(2).run(_with_timer, str(tmp_path / "t.json"))
    assert written[0]["exposed_wait_s"] > 5e-3
    trace = json.loads((tmp_path / "t.json").read_text())
    on_device = [e for e in trace["traceEvents"] if e.get("cat") == "device"]
    assert {e["name"] for e in on_device} >= {
        "shardkit.forward(layers.1)",
        "shardkit.all_gather.wait(layers.1)",
    }
    waits = [
        e
        for e in trace["traceEvents"]
        if e["name"] == "shardkit.all_gather.wait(layers.1)" and e["ph"] == "X"
    ]
    for wait in waits:
        if wait["cat"] == "shardkit":
            assert wait["args"]["device_us"] >= 1000
    assert analyse(of_events(read_events([tmp_path / "t.json"]))).exposed_us[0] > 5 * 1000


@on_ranks(2)
def test_nothing_of_a_trace_is_left_in_later_steps(rank: int, tmp_path: Path) -> None:
    train(rank, "sharded_ddp", "", 2, str(tmp_path / "t.json"), range(1))
    model, optimizer = sharded("fsdp", "")
    for _ in range(2):
        with CallCounter() as calls:
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
    assert [name for file, name in calls.by_function if "/shardkit/tracing/" in file] == []
