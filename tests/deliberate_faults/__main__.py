"""Plants deliberate faults: ``python -m tests.deliberate_faults [--only WORD] [--list]``."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.deliberate_faults.fault import all_faults
from tests.deliberate_faults.planting import Copy


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.deliberate_faults", description=__doc__)
    parser.add_argument("--only", metavar="WORD", help="faults with this in part, words, symbol or tests")
    parser.add_argument("--environment", choices=["core", "xla"], help="faults whose tests run there")
    parser.add_argument("--list", action="store_true", help="print them and end")
    options = parser.parse_args()
    chosen = [
        f
        for f in all_faults()
        if (not options.only or options.only.lower() in " ".join((f.name, f.symbol, *f.tests)).lower())
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
