"""Programs as they are on a machine whose accelerator torch finds when it is imported: nobody names a backend."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.late_device.build import library, missing
from tests.started import program

pytestmark = [
    pytest.mark.skipif(bool(missing()), reason=f"the device can't be compiled: {missing()}"),
]
_ROOT = Path(__file__).parents[2]
_PROGRAM = program("train_on_the_accelerator")


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
    lines = _run(machine, _PROGRAM).split("\n")
    assert {"late:0", "late:1", "the CPU's numbers"} <= set(lines)
