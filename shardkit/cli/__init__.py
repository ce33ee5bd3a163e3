"""The command line: ``shardkit COMMAND ...``, or ``python -m shardkit COMMAND ...``.

A command is a module here: its name is the command's (with dashes), its docstring the help, and it has
``add_arguments(parser)`` and ``run(options) -> exit status``. What it needs beyond torch it imports in ``run``.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from types import ModuleType

from . import ckpt, doctor, estimate, migrate, rehearse, run, run_as_fairscale, trace, verify

COMMANDS: tuple[ModuleType, ...] = (
    ckpt,
    doctor,
    estimate,
    migrate,
    rehearse,
    run,
    run_as_fairscale,
    trace,
    verify,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="shardkit", description="Sharded training for PyTorch.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for module in COMMANDS:
        text = (module.__doc__ or "").strip()
        command = commands.add_parser(
            module.__name__.rpartition(".")[2].replace("_", "-"),
            help=text.partition("\n")[0],
            description=text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    options = parser.parse_args(arguments)
    status: int = options.run(options)
    return status
