"""A client under torchrun finds what one process finds, and its ranks end by themselves, in silence."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

from tests.clients.test_sequence_trainer import check
from tests.clients.under_torchrun import CONFIG, STEPS

ROOT = Path(__file__).resolve().parents[2]


def test_a_client_under_torchrun(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, "-m", "tests.clients.under_torchrun", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, timeout=400, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert not done.stdout
    assert not done.stderr
    found = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2)]
    check(found, CONFIG, STEPS)
