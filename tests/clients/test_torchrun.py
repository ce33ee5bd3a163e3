"""A client under torchrun finds what one process finds, and its ranks end by themselves, in silence."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.clients.test_sequence_trainer import check
from tests.clients.under_torchrun import CONFIG, STEPS
from tests.started import TORCHRUN, ran


def test_a_client_under_torchrun(tmp_path: Path) -> None:
    done = ran(*TORCHRUN, "-m", "tests.clients.under_torchrun", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert not done.stdout
    assert not done.stderr
    found = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2)]
    check(found, CONFIG, STEPS)
