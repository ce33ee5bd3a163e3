"""looks at this machine, or at all machines of a job, and says what is in the way of training

shardkit doctor --ranks 64
shardkit run --ranks 2 --nodes 4 --rdzv node0:29400 --id look -m shardkit doctor

Versions, devices, limits, shared memory, interfaces, variables; bandwidth, round trips and clocks between ranks, by a
few that it starts, or by those of the job. Each finding comes with what to do. Exit status: 1 if jobs would fail.
"""

from __future__ import annotations

import argparse
import json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--ranks", type=int, help="of the job that limits have to do for (default: this job's, or 8)")
    add("--json", action="store_true", help="prints data, not text")


def run(options: argparse.Namespace) -> int:
    """Prints the report, on rank 0."""
    from shardkit.tools.doctor.examine import as_data, as_text, examine

    report = examine(options.ranks)
    if report is None:
        return 0
    print(json.dumps(as_data(report), indent=1) if options.json else as_text(report), flush=True)
    return 0 if report.is_well else 1
