"""The command line: ``shardkit COMMAND ...``, or ``python -m shardkit COMMAND ...``.

A command is a module here: its name is the command's (with dashes), its docstring the help, and it has
``add_arguments(parser)`` and ``run(options) -> exit status``. What it needs, torch too, it imports in ``run``: help and
a mistyped word are answered at once. An error that it raises is printed, with status 2. Those that run a program in
this process say so (``RUNS_A_PROGRAM``), and what the program raises passes through.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Sequence
from types import ModuleType

from shardkit.errors import ShardkitError
from shardkit.version import __version_tuple__

from . import ckpt, doctor, estimate, migrate, rehearse, run, run_as_fairscale, run_as_fsdp2, trace, verify

COMMANDS = (ckpt, doctor, estimate, migrate, rehearse, run, run_as_fairscale, run_as_fsdp2, trace, verify)


class _Parser(argparse.ArgumentParser):
    """Knows what was meant by a mistyped word."""

    def _check_value(self, action: argparse.Action, value: object) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError:
            meant = difflib.get_close_matches(str(value), list(action.choices or ()), 1)
            if meant:
                raise argparse.ArgumentError(action, f"{value}: did you mean {meant[0]}?") from None
            raise


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit status."""
    parser = _Parser(prog="shardkit", description="Sharded training for PyTorch.")
    version = ".".join(map(str, __version_tuple__))
    parser.add_argument("--version", action="version", version=f"shardkit {version}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for module in COMMANDS:
        text = (module.__doc__ or "").strip()
        command = commands.add_parser(
            _name(module),
            help=text.partition("\n")[0],
            description=text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(command)
        command.set_defaults(command=module)
    options = parser.parse_args(arguments)
    command, status = options.command, 2
    if getattr(command, "RUNS_A_PROGRAM", False):
        return int(command.run(options))
    try:
        status = command.run(options)
        sys.stdout.flush()
    except BrokenPipeError:  # "| head" has seen enough
        sys.stderr.close()
        return 0
    except (ShardkitError, OSError) as error:
        print(f"shardkit {_name(command)}: {error}", file=sys.stderr)
    return status


def _name(module: ModuleType) -> str:
    return module.__name__.rpartition(".")[2].replace("_", "-")
