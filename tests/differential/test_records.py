"""Traces on record: made by this code, found by what made them, and the same when they come back."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest
import torch

from shardkit.tools.verify.comparing import Difference
from tests.programs import records
from tests.programs.result import Checkpoint, Moment, RankRun

pytestmark = pytest.mark.oracle
VALUES = {
    "plain": torch.randn(3, 2),
    "transposed": torch.randn(3, 2).t(),
    "number": torch.tensor(1.5, dtype=torch.float64),
    "half": torch.randn(5).bfloat16(),
    "nothing": torch.empty(0, 2),
    "counts": torch.arange(3),
}


def test_the_records_are_of_this_code() -> None:
    """If it fails: ``python -m tests.programs.records`` (minutes). Until then all traces are computed."""
    made_from, versions = records.written_from()
    assert made_from == records.sources()
    assert versions.startswith(importlib.metadata.version("fairscale"))


def test_packing() -> None:
    runs = [RankRun([Moment(0, "Step", params=VALUES)], [[["a"]]])] * 2
    data = records.packed(runs)
    assert len(data) < len(records.packed(runs[:1])) + 50  # what ranks have in common stands there once
    for run in records.unpacked(data):
        assert run.partition == [[["a"]]]
        for name, value in run.moments[0].params.items():
            torch.testing.assert_close(value, VALUES[name], rtol=0, atol=0)
            assert value.stride() == VALUES[name].stride()


def _runs(loss: float) -> list[RankRun]:
    return [RankRun([Moment(0, "Train", losses=[loss])])]


def test_what_is_on_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts for the same program, code and versions, and a checkpoint that is equal up to rounding."""

    def loss(what: str, given: Checkpoint | None = None) -> float:
        return records.recorded(what, given, lambda: _runs(2.0))[0].moments[0].losses[0]

    start = Checkpoint({"a": torch.ones(2)}, [])
    monkeypatch.setattr(records, "FILE", tmp_path / "traces.zip")
    monkeypatch.setattr(records, "_WRITE", str(tmp_path / "traces.zip"))
    for what, given in (("one", None), ("two", start)):
        records.recorded(what, given, lambda: _runs(1.0))
    monkeypatch.setattr(records, "_WRITE", None)
    records._records.cache_clear()
    try:
        assert loss("one") == 1.0
        assert loss("another") == 2.0
        assert loss("two", Checkpoint({"a": torch.ones(2) * (1 + 1e-7)}, [])) == 1.0
        for other in ({"a": torch.ones(2) * 2}, {"b": torch.ones(2)}, {"a": torch.ones(2).double()}):
            assert loss("two", Checkpoint(other, [])) == 2.0
        for part in ("sources", "versions"):
            with monkeypatch.context() as changed:
                changed.setattr(records, part, lambda: "other")
                assert loss("one") == 2.0
    finally:
        records._records.cache_clear()


def test_what_differs_from_a_record_is_computed() -> None:
    seen: list[float] = []

    @records.or_computed
    def check(wanted: float, *, is_on_record: bool = True) -> None:
        records._counts["found"] += is_on_record and not records._counts["unwanted"]
        seen.append(1.0 if is_on_record and not records._counts["unwanted"] else 2.0)
        if seen[-1] != wanted:
            raise Difference("here", "differs")

    check(1.0)
    check(2.0)
    with pytest.raises(Difference):
        check(3.0)
    with pytest.raises(Difference):
        check(3.0, is_on_record=False)
    assert seen == [1.0, 1.0, 2.0, 1.0, 2.0, 2.0]
    assert not records._counts["unwanted"]
