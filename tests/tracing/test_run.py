"""``shardkit run --trace``."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from shardkit.tools.cli import main
from shardkit.tools.trace import analyse
from shardkit.tracing.timeline import of_events, read_events
from tests.started import program, ran

PROGRAM = program("train_with_a_late_rank")


@pytest.mark.parametrize(("steps", "traced"), [("2:3", 2), ("3:9", 2)])
def test_some_steps_of_a_run(tmp_path: Path, steps: str, traced: int) -> None:
    """The second asks for more than there are: each rank leaves its part."""
    shutil.copy(PROGRAM, tmp_path / "train.py")
    run = ["-m", "shardkit", "run", "--ranks", "2", "--id", "a", "--trace"]
    done = ran(*run, f"steps={steps}", "train.py", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"shardkit trace {tmp_path / 'runs' / 'a'}" in done.stderr
    found = analyse(of_events(read_events([tmp_path / "runs" / "a"])))
    assert found.steps == traced
    assert (found.late[0].rank, *found.late[0].place) == (1, "forward", "1")


def test_steps_that_are_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--trace", "10-12", __file__]) == 2
    assert "--trace '10-12': write steps=FIRST:LAST" in capsys.readouterr().err
