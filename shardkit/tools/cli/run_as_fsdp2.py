"""runs a program for which torch's fully_shard (FSDP2) is shardkit's, without changing it

shardkit run-as-fsdp2 train.py --epochs 3
shardkit run-as-fsdp2 -m torchtitan.train --model.name llama3
torchrun --nproc-per-node 2 -m shardkit run-as-fsdp2 train.py --epochs 3
"""

from __future__ import annotations

import argparse

from .run_as_fairscale import RUNS_A_PROGRAM, add_arguments

__all__ = ["RUNS_A_PROGRAM", "add_arguments", "run"]


def run(options: argparse.Namespace) -> int:
    """Runs the program as ``__main__``; what it raises passes through, SystemExit too."""
    from shardkit.tools.run.rank import run_program
    from shardkit.torch_fsdp import fsdp2

    fsdp2.install()
    run_program([options.program, *options.arguments], options.is_module)
    return 0
