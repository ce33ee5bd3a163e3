"""Tables of pages are made of what runs: docs/SUPPORT.md of docs/support.json, the contract's in docs/TESTING.md."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.backends.contract_programs import CONTRACT
from tests.backends.environments import WORLD_SIZES
from tests.support import report
from tests.support.recording import FEATURES, ROOT, Recorder, feature_of


def test_the_page_is_made_of_the_results() -> None:
    """By ``python -m tests.support``."""
    assert report.page(report.read()) == report.PAGE.read_text()


def test_every_place_exists() -> None:
    for places in FEATURES.values():
        for place in places.split():
            assert (ROOT / "tests" / place).exists(), place


def test_results_are_counted(tmp_path: Path) -> None:
    """A test that passes, one that fails and one that is skipped."""
    written = ROOT / "tests" / "oss" / "test_written.py"
    assert feature_of(written) == "`OSS`"
    recorder = Recorder(tmp_path / "results.json")
    for outcome in ("passed", "failed", "skipped"):
        _report(recorder, written, outcome)
    recorder.pytest_sessionfinish()
    assert '"`OSS`": {"gloo": {"2": [1, 1]}}' in (tmp_path / "results.json").read_text()


def _report(recorder: Recorder, path: Path, outcome: str) -> None:
    """What pytest tells a plugin of one test."""
    from types import SimpleNamespace

    from tests.pools import USED

    item, call = SimpleNamespace(path=path), SimpleNamespace()
    recorder.pytest_runtest_setup(item)  # type: ignore[arg-type]
    USED.add((2, "gloo"))
    result = SimpleNamespace(when="call", skipped=outcome == "skipped", failed=outcome == "failed")
    steps = recorder.pytest_runtest_makereport(item, call)  # type: ignore[arg-type]
    next(steps)  # type: ignore[call-overload]
    with pytest.raises(StopIteration):
        steps.send(result)  # type: ignore[attr-defined]


def test_a_run_of_one_environment_keeps_the_others() -> None:
    results = {"2.13.0": {"`OSS`": {"gloo": {"2": [3, 1]}, "late": {"2": [1, 0]}}}}
    report.merge(results, "2.13.0", {"`FSDP`": {"late": {"2": [2, 0]}}}, {"late", "tpu"})
    assert results["2.13.0"] == {"`OSS`": {"gloo": {"2": [3, 1]}}, "`FSDP`": {"late": {"2": [2, 0]}}}


_PAGE = Path(__file__).parents[2] / "docs" / "TESTING.md"


def test_environments_and_ranks() -> None:
    text = _PAGE.read_text().partition("## The contract by backend\n")[2].partition("\n## ")[0]
    rows = [line.split("|")[1:3] for line in text.splitlines() if line.startswith("| `")]
    found = {name.strip(" `"): tuple(map(int, ranks.split(","))) for name, ranks in rows}
    assert found == WORLD_SIZES
    assert f"One suite of {len(CONTRACT)} programs" in text
