"""runs a program on ranks: their logs, why they failed, restarts from the last checkpoint

shardkit run --ranks 4 train.py --epochs 3
shardkit run --ranks 4 --restarts 3 --min-ranks 3 train.py
shardkit run --ranks 8 --nodes 2:4 --rdzv node0:29400 --id job17 --restarts 3 -m package.train

Ranks find in their environment what torchrun sets. runs/ID/ has what each rank printed; rank 0's is shown. When a rank
fails, a page says why, where the others stood, which checkpoint is complete, and how to go on. SIGTERM (or Ctrl-C) asks
the program to save and to end (shardkit.stop_requested()); twice ends it at once.

Exit status: 0; 1 after a failure; 2 if it can't be started; 75 if the program has saved and stopped.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from dataclasses import fields
from pathlib import Path

from . import run_as_fairscale


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--ranks", type=int, help="processes on each machine (default: one for each accelerator, or 1)")
    add("--nodes", type=_nodes, default=(1, 1), metavar="N or MIN:MAX", help="machines (default: 1)")
    add("--rdzv", dest="rendezvous", default="", metavar="HOST:PORT", help="where machines meet: one of them")
    add("--restarts", type=int, default=0, help="of all ranks, when one has failed (default: 0)")
    add(
        "--min-ranks",
        dest="least",
        type=int,
        metavar="MIN_RANKS",
        help="ranks on each machine to go on with, when one has failed twice (default: all)",
    )
    add("--id", default="", help="the run's name (default: the time; SLURM_JOB_ID)")
    add("--runs", type=Path, default=Path("runs"), help="folder of runs (default: runs)")
    add("--join-timeout", type=int, default=600, metavar="SECONDS", help="for other machines (default: 600)")
    add(
        "--trace",
        default="",
        metavar="steps=FIRST:LAST",
        help="runs/ID/trace.json has these steps of all ranks, both included and counted from 0, as steps=10:12 for "
        "three of them; shardkit trace explains it",
    )
    add(
        "--grace",
        type=float,
        default=60,
        metavar="SECONDS",
        help="to save and end after SIGTERM; then a page says where ranks stand, and they are ended (default: 60)",
    )
    add(
        "--stuck-after",
        type=float,
        default=3600,
        metavar="SECONDS",
        help="ranks hang when none has made a step of an optimizer or printed anything for so long: that is a failure, "
        "which --restarts answers (default: 3600; 0: never)",
    )
    run_as_fairscale.add_arguments(parser)


def run(options: argparse.Namespace) -> int:
    from shardkit.tools.run import RunOptions, launcher

    names = {field.name for field in fields(RunOptions)}
    given = {name: value for name, value in vars(options).items() if name in names}
    given["program"] = [*["-m"] * options.is_module, options.program, *options.arguments]
    given["command"] = shlex.join(["shardkit", *sys.argv[1:]])
    if options.ranks is None:
        import torch

        given["ranks"] = torch.accelerator.device_count() or 1
    return launcher.run(RunOptions(**given))


def _nodes(text: str) -> tuple[int, int]:
    least, _, most = text.partition(":")
    try:
        return int(least), int(most or least)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text}: write N or MIN:MAX") from None
