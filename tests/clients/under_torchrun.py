"""A client as a program: ``torchrun ... -m tests.clients.under_torchrun FOLDER``.

What each rank has found is in ``FOLDER/rank<number>.pt``. The process group is left to the interpreter's end, as most
of the projects do it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from tests.clients.sequence_trainer import Config
from tests.clients.test_sequence_trainer import run

CONFIG = Config(use_sharded_state=True)
STEPS = 3

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.save(run(rank, CONFIG, str(folder), STEPS), folder / f"rank{rank}.pt")
