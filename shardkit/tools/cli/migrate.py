"""rewrites imports of fairscale to shardkit's

Import statements change, and nothing else: comments, formatting, line ends and encoding stay, byte for byte. A variable
keeps its name: "import fairscale" becomes "import shardkit as fairscale". What the rewriting can't decide is reported
as FILE:LINE: strings that name fairscale (also in configuration files), names that shardkit doesn't have, and names for
which there is something better.

Exit status: 0; with --check, 1 if something is to be rewritten; 2 if a file could not be handled.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("paths", nargs="+", type=Path, metavar="PATH", help="files, or folders with all below them")
    add("--diff", action="store_true", help="print what would change; write nothing")
    add("--check", action="store_true", help="exit with 1 if something would change; write nothing")
    add(
        "--strings",
        action="store_true",
        help="rewrite strings, too, that are the path of something shardkit has",
    )
    add("--xla", action="store_true", help="rewrite imports of torch_xla's FSDP, too")
    add("--torch-fsdp", action="store_true", help="rewrite imports of torch's FSDP1, too")


def run(options: argparse.Namespace) -> int:
    """Rewrites, or shows what would be."""
    from shardkit.tools.migration import files

    dry = options.diff or options.check
    changed = failed = 0
    missing = [path for path in options.paths if not path.exists()]
    for path in missing:
        print(f"shardkit migrate: there is no {path}", file=sys.stderr)
    if missing:
        return 2
    for path in files.below(options.paths):
        result = files.migrate(path, strings=options.strings, xla=options.xla, torch_fsdp=options.torch_fsdp)
        if not dry:
            result = result.written()
        changed += result.is_changed
        failed += result.error is not None
        for message in result.messages():
            print(message)
        if options.diff:
            print(result.diff(), end="")
    left = f", left alone: {failed}" if failed else ""
    print(f"files {'to change' if dry else 'changed'}: {changed}{left}")
    if failed:
        return 2
    return int(options.check and changed > 0)
