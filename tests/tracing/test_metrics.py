"""Numbers of a training, and where they go."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import shardkit
from shardkit.errors import ConfigurationError, LifecycleError
from shardkit.tracing import ranges
from shardkit.tracing.metrics import JsonLines, TensorBoard, of_ranks
from tests.figures.counters import OperationCounter
from tests.pools import rank_pool
from tests.tracing.trainings import sharded


def _train(rank: int, folder: str, **options: Any) -> tuple[list[dict[str, float]], int]:
    model, optimizer = sharded("fsdp", "")
    found: list[dict[str, float]] = []
    with (
        shardkit.Metrics(f"{folder}/m.jsonl", found.append, every=2, **options) as metrics,
        OperationCounter(2) as n,
    ):
        for count in range(4):
            loss = model(torch.full((2, 8), float(count))).square().mean()
            loss.backward()
            norm = model.clip_grad_norm_(0.5)
            optimizer.step()
            optimizer.zero_grad()
            metrics.step(loss=loss, tokens=10 * (rank + 1), samples=2, learning_rate=0.125)
    assert not ranges.listening
    if found and not options.get("over_ranks"):
        assert found[-1]["gradient_norm"] == norm.item()
    return found, sum(n.collectives.values())


def _each_way(rank: int, folder: str) -> list[tuple[list[dict[str, float]], int]]:
    ways: list[dict[str, Any]] = [{}, {"over_ranks": True}, {"per_rank": True}]
    return [_train(rank, f"{folder}/{k}", **way) for k, way in enumerate(ways)]


def test_records(tmp_path: Path) -> None:
    first, second = rank_pool(2).run(_each_way, str(tmp_path))
    (own, without), (of_all, _), (mine, _) = first
    assert second[0] == ([], without)  # rank 0 writes; no collective comes with it
    assert second[1][0] == []
    for records in (own, of_all, mine, second[2][0]):
        assert [r["step"] for r in records] == [2, 4]
        for r in records:
            assert r["learning_rate"] == 0.125
            assert r["loss"] >= 0
            assert 0 < r["step_time_s"] < 60
            assert 0 <= r["exposed_wait_s"] <= r["step_time_s"]
            assert r["peak_memory_bytes"] > 1e6
    # 8 * 128 + 128 + 128 + 1 of the root and 128 * 128 + 128 of four layers, of which the last is not gathered again;
    # one padded; half of each is here; gradients have flags
    assert own[1]["gathered_bytes"] == (1282 + 7 * 16512) * 4 / 2
    assert own[1]["reduced_bytes"] >= (1282 + 4 * 16512) * 4 / 2
    assert of_all[1]["gathered_bytes"] == 2 * own[1]["gathered_bytes"]
    assert of_all[1]["tokens_per_s"] > own[1]["samples_per_s"]
    assert of_all[1]["waited_for_rank"] in (0, 1)
    names = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.jsonl"))
    assert names == ["0/m.jsonl", "1/m.jsonl", "2/m.rank-0.jsonl", "2/m.rank-1.jsonl"]
    written = [json.loads(line) for line in (tmp_path / "0" / "m.jsonl").read_text().splitlines()]
    assert written == own


def test_what_numbers_of_ranks_become() -> None:
    one = {"step": 4, "step_time_s": 1.0, "loss": 1.0, "tokens_per_s": 10.0, "exposed_wait_s": 0.5}
    other = {"step": 4, "step_time_s": 1.5, "loss": 3.0, "tokens_per_s": 20.0, "exposed_wait_s": 0.1}
    assert of_ranks([one, other]) == {
        "step": 4, "step_time_s": 1.5, "loss": 2.0, "tokens_per_s": 30.0, "exposed_wait_s": 0.3,
        "exposed_wait_s_max": 0.5, "waited_for_rank": 1,
    }  # fmt: skip


def test_lines_are_json_whatever_numbers_there_are(tmp_path: Path) -> None:
    sink = JsonLines(tmp_path / "new" / "m.jsonl")
    sink.write({"step": 1, "loss": float("nan")})
    sink.close()
    assert json.loads((tmp_path / "new" / "m.jsonl").read_text()) == {"step": 1, "loss": "nan"}


def test_tensorboard_reads_what_is_written(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = TensorBoard(tmp_path)
    assert not list(tmp_path.iterdir())  # ranks that write nothing leave no file
    for step in (2, 4):
        sink.write({"step": step, "time": 1e9, "loss": 1.0 / step})
    sink.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(e.step, e.value, e.wall_time) for e in events.Scalars("loss")] == [(2, 0.5, 1e9), (4, 0.25, 1e9)]


def _refused(rank: int) -> list[str]:
    found = []
    for sinks, options in (
        ((), {}),
        ((3,), {}),
        (("m",), {"every": 0}),
        ((print,), {"over_ranks": True, "per_rank": True}),
    ):
        try:
            shardkit.Metrics(*sinks, **options)
        except ConfigurationError as error:
            found.append(str(error))
    metrics = shardkit.Metrics(print)
    metrics.close()
    metrics.close()
    try:
        metrics.step()
    except LifecycleError as error:
        found.append(str(error))
    return found


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for found in rank_pool(2, "simulated").run(_refused):
        assert len(found) == 5
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigurationError, match="pip install"):
        TensorBoard("x")
