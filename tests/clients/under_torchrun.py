"""The clients one after the other: ``torchrun ... -m tests.clients.under_torchrun FOLDER``.

What each rank has found is in ``FOLDER/rank<number>.pt``. The process group is left to the interpreter's end, as most
of the projects do it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from tests.clients import (
    sequence_trainer,
    test_sequence_trainer,
    test_zero_trainer,
    zero_trainer,
)

SEQUENCE = sequence_trainer.Config(use_sharded_state=True)
SEQUENCE_STEPS = 3
ZERO = [
    zero_trainer.Arguments(frozenset({"simple"}), accumulation=2),
    zero_trainer.Arguments(frozenset({"zero_dp_3", "auto_wrap"})),
]


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    world = dist.get_world_size()
    for name in ("sequence", "zero0", "zero1"):
        (folder / name).mkdir(exist_ok=True)
    found = {
        "sequence": test_sequence_trainer.run(rank, SEQUENCE, str(folder / "sequence"), SEQUENCE_STEPS),
        "zero0": test_zero_trainer.train(ZERO[0], world, rank, folder / "zero0"),
        "zero1": test_zero_trainer.train(ZERO[1], world, rank, folder / "zero1"),
    }
    torch.save(found, folder / f"rank{rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
