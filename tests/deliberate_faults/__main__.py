"""Plants deliberate faults: ``python -m tests.deliberate_faults [--only WORD] [--list] [--report]``."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.deliberate_faults.planting import Copy
from tests.deliberate_faults.report import write_report
from tests.deliberate_faults.table import FAULTS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.deliberate_faults", description=__doc__)
    parser.add_argument("--only", metavar="WORD", help="faults with this in part, words, file or tests")
    parser.add_argument("--environment", choices=["core", "xla"], help="faults whose tests run there")
    parser.add_argument("--list", action="store_true", help="print them and end")
    parser.add_argument("--report", action="store_true", help="write the table of docs/TESTING.md and end")
    options = parser.parse_args()
    if options.report:
        write_report()
        return 0
    chosen = [
        f
        for f in FAULTS
        if (not options.only or options.only.lower() in " ".join((f.name, f.file, *f.tests)).lower())
        and options.environment in (None, f.environment)
    ]
    if options.list or not chosen:
        print("\n".join(f.name for f in chosen) or "no such fault")
        return 0 if chosen else 2
    unnoticed = []
    with tempfile.TemporaryDirectory(prefix="shardkit-faults-") as folder:
        copy = Copy(Path(folder))
        for fault in chosen:
            start = time.monotonic()
            red, problem = copy.try_out(fault)
            seconds = time.monotonic() - start
            print(f"{'UNNOTICED' if problem else 'noticed  '} {fault.name} ({seconds:.0f} s)", flush=True)
            for line in [*red, *problem.splitlines()]:
                print(f"    {line}", flush=True)
            if problem:
                unnoticed.append(fault.name)
    print(f"{len(chosen) - len(unnoticed)} of {len(chosen)} deliberate faults were noticed")
    return 1 if unnoticed else 0


if __name__ == "__main__":
    sys.exit(main())
