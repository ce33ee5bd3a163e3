"""Programs as they are on a machine whose accelerator torch finds when it is imported: nobody names a backend."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.late_device.build import library, missing

pytestmark = [
    pytest.mark.skipif(bool(missing()), reason=f"the device can't be compiled: {missing()}"),
]
_ROOT = Path(__file__).parents[2]
_PROGRAM = """
    import torch
    import shardkit

    def train(rank):
        torch.manual_seed(0)
        model = shardkit.FSDP(torch.nn.Linear(5, 3).to(torch.accelerator.current_accelerator()))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.full((2, 5), float(rank)).to("late")
        model(x).sum().backward()
        optimizer.step()
        print(next(model.parameters()).device, flush=True)
        return model.state_dict()["bias"].cpu().tolist()

    if __name__ == "__main__":
        torch.manual_seed(0)
        bias = torch.nn.Linear(5, 3).bias - 0.2  # each of the 3 sums has 2 rows
        found = shardkit.launch(train, 2)
        assert all(torch.allclose(torch.tensor(b), bias) for b in found), (found, bias)
        print("the CPU's numbers")
"""


@pytest.fixture
def machine(tmp_path: Path) -> dict[str, str]:
    """Variables of a process on it."""
    library()
    path = f"{_ROOT}{os.pathsep}{_ROOT / 'tests/late_device/machine'}"
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "1"}


def _run(machine: dict[str, str], *command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command], env=machine, capture_output=True, text=True, check=False, timeout=400
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_launch_takes_the_accelerator(machine: dict[str, str], tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(_PROGRAM))
    lines = _run(machine, str(program)).split("\n")
    assert {"late:0", "late:1", "the CPU's numbers"} <= set(lines)
