"""The command line: ``shardkit COMMAND ...``, or ``python -m shardkit COMMAND ...``.

A command is a module here: its name is the command's (with dashes), its docstring the help, and it has
``add_arguments(parser)`` and ``run(options) -> exit status``. What it needs, torch too, it imports in ``run``: help and
a mistyped word are answered at once.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from types import ModuleType

from shardkit.version import __version_tuple__

from . import ckpt, doctor, estimate, migrate, rehearse, run, run_as_fairscale, run_as_fsdp2, trace, verify

COMMANDS: tuple[ModuleType, ...] = (
    ckpt,
    doctor,
    estimate,
    migrate,
    rehearse,
    run,
    run_as_fairscale,
    run_as_fsdp2,
    trace,
    verify,
)


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
    parser.add_argument(
        "--version", action="version", version=f"shardkit {'.'.join(map(str, __version_tuple__))}"
    )
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
