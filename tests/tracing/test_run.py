"""``shardkit run --trace``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardkit.tools.cli import main
from shardkit.tools.trace.report import analyse
from shardkit.tracing.timeline import of_events, read_events

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import time
import torch
import shardkit

def main(rank):
    model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(3)])
    for layer in model:
        shardkit.fully_shard(layer)
    shardkit.fully_shard(model)
    if rank == 1:
        model[1].register_forward_pre_hook(lambda *_: time.sleep(0.1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

if __name__ == "__main__":
    torch.distributed.init_process_group("gloo")
    main(torch.distributed.get_rank())
    torch.distributed.destroy_process_group()
"""


@pytest.mark.parametrize(("steps", "traced"), [("2:3", 2), ("3:9", 2)])
def test_some_steps_of_a_run(tmp_path: Path, steps: str, traced: int) -> None:
    """The second asks for more than there are: each rank leaves its part."""
    (tmp_path / "train.py").write_text(PROGRAM)
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
        [*command, "train.py"], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert f"shardkit trace {tmp_path / 'runs' / 'a'}" in done.stderr
    found = analyse(of_events(read_events([tmp_path / "runs" / "a"])))
    assert found.steps == traced
    assert tuple(found.late[0].cause) == (1, "forward", "1")


def test_steps_that_are_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--trace", "10-12", __file__]) == 2
    assert "--trace '10-12': write steps=FIRST:LAST" in capsys.readouterr().err
