"""Programs that tests start in processes of their own, as users do: one file each."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def program(name: str) -> str:
    """The path of a program of this folder."""
    return str(Path(__file__).with_name(f"{name}.py"))


def environment(**variables: str) -> dict[str, str]:
    """Variables for a process that finds this repository's shardkit and tests."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}


def output_of(*arguments: str, seconds: float = 400) -> str:
    """What Python prints when it runs a program with these arguments, without error."""
    done = subprocess.run(
        [sys.executable, *arguments],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
