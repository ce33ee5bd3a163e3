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


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def ran(
    *arguments: str, folder: Path = ROOT, seconds: float = 400, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Runs Python with these arguments in a folder, and with these variables besides; how it ended is returned."""
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment(**variables), stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=seconds, check=False,
    )  # fmt: skip


def output_of(*arguments: str, folder: Path = ROOT, seconds: float = 400, **variables: str) -> str:
    """What Python prints that ends without error."""
    done = ran(*arguments, folder=folder, seconds=seconds, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
