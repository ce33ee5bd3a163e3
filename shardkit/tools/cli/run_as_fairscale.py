"""runs a program for which fairscale is shardkit, without changing it

shardkit run-as-fairscale train.py --epochs 3
shardkit run-as-fairscale -m package.train --epochs 3
torchrun --nproc-per-node 2 -m shardkit run-as-fairscale train.py --epochs 3
"""

from __future__ import annotations

import argparse

RUNS_A_PROGRAM = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds a program and its own arguments, which come last."""
    add = parser.add_argument
    add("-m", dest="is_module", action="store_true", help="the program is a module's name")
    add("program", help="a script; with -m, a module")
    add("arguments", nargs=argparse.REMAINDER, help="the program's own")


def run(options: argparse.Namespace) -> int:
    """Runs the program as ``__main__``; what it raises passes through, SystemExit too."""
    from shardkit import compat
    from shardkit.tools.run.rank import run_program

    compat.install()
    run_program([options.program, *options.arguments], options.is_module)
    return 0
