"""runs a program for which fairscale is shardkit, without changing it

shardkit run-as-fairscale train.py --epochs 3
shardkit run-as-fairscale -m package.train --epochs 3
torchrun --nproc-per-node 2 -m shardkit run-as-fairscale train.py --epochs 3
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys

from shardkit import compat

RUNS_A_PROGRAM = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds a program and its own arguments, which come last."""
    parser.add_argument("-m", dest="is_module", action="store_true", help="the program is a module's name")
    parser.add_argument("program", help="a script; with -m, a module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the program's own")


def run(options: argparse.Namespace) -> int:
    """Runs the program as ``__main__``; what it raises passes through, SystemExit too."""
    compat.install()
    return run_program(options)


def run_program(options: argparse.Namespace) -> int:
    """Runs the program in this process."""
    sys.argv = [options.program, *options.arguments]
    # Put in front, as Python does; what is there stays, since this package may have been found by it.
    sys.path.insert(
        0, os.getcwd() if options.is_module else os.path.dirname(os.path.abspath(options.program))
    )
    if options.is_module:
        runpy.run_module(options.program, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(options.program, run_name="__main__")
    return 0
