"""The program for GPUs, tried without one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu import __main__ as program
from tests.gpu import cases, report
from tests.gpu.exposed import communication, of_profile
from tests.gpu.plan import Phase, plan

ROOT = Path(__file__).parents[2]
TRIED = "environment,contract,alignment,channels,bench tiny both,bench tiny offload"


def _program(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.gpu", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


def test_a_report_with_all_its_tables(tmp_path: Path) -> None:
    done = _program("--device", "cpu", "--output", str(tmp_path), "--only", TRIED)
    assert done.returncode == 0, done.stdout + done.stderr
    text = (tmp_path / "GPU.md").read_text()
    assert "the numbers say nothing about GPUs" in text
    assert f"| torch | {torch.__version__} |" in text
    for name in TRIED.split(","):
        assert f"| {name} | ok |" in text
    assert " passed" in text
    for way in (*cases.ways(cases.VARIANTS["both"], "cpu"), *cases.VARIANTS["offload"].by):
        assert f"| {cases.WAYS[way]} | " in text
    assert "error" not in text.lower()
    assert "| bfloat16, 2 bytes |" in text
    assert "| channel gradients |" in text
    assert "| one rank, float32 |" in text
    assert "2 of 2 layers" in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu_is_said_in_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["tests.gpu"])
    assert program.main() == 2
    assert capsys.readouterr().out.splitlines() == [
        "no GPU is visible (torch.cuda.is_available() is False); --device cpu tries the program without one"
    ]
    monkeypatch.setattr(sys, "argv", ["tests.gpu", "--device", "cpu"])  # never into docs
    assert program.main() == 2
    assert not (ROOT / "docs" / "GPU.md").exists() or "trial" not in (ROOT / "docs" / "GPU.md").read_text()


def test_a_hang_costs_one_phase() -> None:
    result = program.run_phase(Phase("hangs", "environment", 0.05), "cpu", 0.05)
    assert (result["ended"], result["rows"]) == ("time limit", [])


def test_plan_fits_the_time_and_says_what_it_skips() -> None:
    phases, skipped = plan("cuda", 1)
    assert [line.partition(":")[0] for line in skipped] == ["needs 2 devices", "needs 4 devices"]
    assert plan("cuda", 8)[1] == []
    names = [p.name for p in phases]
    assert len(set(names)) == len(names)
    for phase in phases:
        if phase.kind == "bench":
            assert phase.arguments["size"] in cases.SIZES
            assert phase.arguments["variant"] in cases.VARIANTS
    assert {p.arguments["size"] for p in phases if p.kind == "bench"} == {"124M", "1.3B", "4B", "7B"}
    assert "fairscale_fsdp" in cases.ways(cases.VARIANTS["mixed"], "cuda")


def test_models_have_the_sizes_of_their_names() -> None:
    def millions(name: str) -> float:  # the head is not tied to the embedding
        size = cases.SIZES[name]
        return (size.outside() + size.depth * size.layer() - size.vocabulary * size.width) / 1e6

    assert 120 < millions("124M") < 128
    assert 1250 < millions("1.3B") < 1400
    assert 6400 < millions("7B") < 7000
    assert 3100 < millions("4B") < 4100
    h200 = 141 * 10**9
    assert cases.SIZES["1.3B"].fitting(h200, cases.VARIANTS["mixed"]) == 24
    assert 8 < cases.SIZES["7B"].fitting(h200, cases.VARIANTS["mixed"]) < 32
    assert cases.SIZES["4B"].fitting(24 * 10**9, cases.VARIANTS["offload"]) == 36
    built = cases.build(cases.SIZES["tiny"], 2, cases.VARIANTS["plain"], torch.device("cpu"))
    assert (
        sum(p.numel() for p in built.parameters())
        == cases.SIZES["tiny"].outside() + 2 * cases.SIZES["tiny"].layer()
    )


def test_exposed_communication() -> None:
    computing = [(0.0, 4.0), (6.0, 8.0), (7.0, 9.0)]
    found = communication([(1.0, 2.0), (3.0, 7.0), (8.5, 10.0), (12.0, 13.0)], computing)
    assert found == (1 + 4 + 1.5 + 1, 2 + 1 + 1)
    assert communication([], computing) == (0, 0)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        torch.ones(2).sum()
    assert of_profile(profiler, 1) == (0, 0)  # no event is a device's


def test_goals_and_errors_are_in_the_tables() -> None:
    gib = 2**30

    def row(way: str, **found: Any) -> dict[str, Any]:
        same = {
            "size": "1.3B",
            "variant": "plain",
            "depth": 24,
            "world": 1,
            "losses": [2.0, 1.5],
            "parameters": 10**9,
        }
        return {**same, "way": way, **found}

    rows = [
        row("bare", step=0.100, host=0.05, peak=10 * gib, syncs=0),
        row("fsdp", step=0.101, host=0.06, peak=11 * gib, syncs=0, whole=0.02, exposed=0.01),
        row("fully_shard", step=0.103, host=0.06, peak=13 * gib, syncs=2, whole=0.02, exposed=0.01),
        row("torch_fsdp2", step=0.110, host=0.06, peak=12 * gib, syncs=0, whole=0.02, exposed=0.005),
        row("fairscale_fsdp", error="RuntimeError: no | luck"),
    ]
    results = [{"kind": "bench", "name": "bench", "ended": "ok", "seconds": 1.0, "rows": rows}]
    found = report._by_case(results)
    assert report._goals(found).splitlines()[2:] == [
        "| a step at world size 1 takes less than 2 % more than the plain module's | 1.3B plain, fsdp | +1.00% | yes |",
        "| a step at world size 1 takes less than 2 % more than the plain module's | 1.3B plain, fully_shard | +3.00% "
        "| **no** |",
        "| no host synchronization in a step | 1.3B plain, fsdp | 0 | yes |",
        "| no host synchronization in a step | 1.3B plain, fully_shard | 2 | **no** |",
        "| peak memory is at most FSDP2's | 1.3B plain, fsdp | 11.00 and 12.00 GiB | yes |",
        "| peak memory is at most FSDP2's | 1.3B plain, fully_shard | 13.00 and 12.00 GiB | **no** |",
    ]
    text = report._bench(("1.3B", "plain"), found["1.3B", "plain"])
    assert "| shardkit FSDP | 101.00 | +1.0% | 60.00 | 20.00 | 10.00 | 11.00 | 0 | 1.5000 |" in text
    assert "- fairscale FSDP: `RuntimeError: no | luck`" in text
    rows[1]["world"] = rows[3]["world"] = 2
    wanted = "| exposed communication is at most FSDP2's | 1.3B plain, fsdp | 10.00 and 5.00 ms | **no** |"
    assert wanted in report._goals(found)
