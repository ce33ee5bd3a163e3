"""``shardkit run --trace``."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from shardkit.tools.cli import main
from shardkit.tools.trace import analyse
from shardkit.tracing.timeline import of_events, read_events
from tests.started import environment, program

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = program("train_with_a_late_rank")


@pytest.mark.parametrize(("steps", "traced"), [("2:3", 2), ("3:9", 2)])
def test_some_steps_of_a_run(tmp_path: Path, steps: str, traced: int) -> None:
    """The second asks for more than there are: each rank leaves its part."""
    shutil.copy(PROGRAM, tmp_path / "train.py")
    command = [
        sys.executable,
        "-m",
        "shardkit",
        "run",
        "--ranks",
        "2",
        "--id",
        "a",
        "--trace",
        f"steps={steps}",
    ]
    done = subprocess.run(
        [*command, "train.py"], cwd=tmp_path, env=environment(),
        capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert f"shardkit trace {tmp_path / 'runs' / 'a'}" in done.stderr
    found = analyse(of_events(read_events([tmp_path / "runs" / "a"])))
    assert found.steps == traced
    assert (found.late[0].rank, *found.late[0].place) == (1, "forward", "1")


def test_steps_that_are_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--trace", "10-12", __file__]) == 2
    assert "--trace '10-12': write steps=FIRST:LAST" in capsys.readouterr().err
