"""The clients under torchrun find what one process finds, and their ranks end by themselves, in silence."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from tests.clients import test_sequence_trainer, test_zero_trainer
from tests.clients.under_torchrun import SEQUENCE, SEQUENCE_STEPS, ZERO

ROOT = Path(__file__).resolve().parents[2]


def test_clients_under_torchrun(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, "-m", "tests.clients.under_torchrun", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, timeout=400, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert not done.stdout
    assert not done.stderr
    found: list[dict[str, Any]] = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2)]
    test_sequence_trainer.check([f["sequence"] for f in found], SEQUENCE, SEQUENCE_STEPS)
    for number, args in enumerate(ZERO):
        name = f"zero{number}"
        (tmp_path / f"{name}alone").mkdir()
        test_zero_trainer.check([f[name] for f in found], args, tmp_path / f"{name}alone")
