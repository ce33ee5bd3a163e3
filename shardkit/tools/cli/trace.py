"""explains a trace of a training: what its ranks wait for, which of them is late and why, what to change

shardkit trace runs/17/trace.json
shardkit trace runs/17 --plot step.svg
shardkit trace trace.rank-*.json --merge trace.json

A trace is written by shardkit.trace(), and by shardkit run --trace steps=10:12. https://ui.perfetto.dev shows the same
file. Status: 0, or 2 where there is no trace.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("files", nargs="+", metavar="FILE", help="a trace, its parts (*.rank-N.json), or their folder")
    add("--json", action="store_true", help="prints data, not tables")
    add("--plot", metavar="FILE", help="a picture of a step (.svg, .png, .pdf)")
    add("--step", type=int, help="which step is plotted (default: the last)")
    add("--merge", metavar="FILE", help="writes parts as one trace")


def run(options: argparse.Namespace) -> int:
    from shardkit.launching.run_folder import write_at_once
    from shardkit.tools.trace.plots import plot
    from shardkit.tools.trace.report import analyse, as_data, as_text
    from shardkit.tracing.timeline import of_events, read_events

    events = read_events(options.files)
    trace = of_events(events)
    found = analyse(trace)
    if options.merge:
        merged = Path(options.merge)
        merged.parent.mkdir(parents=True, exist_ok=True)
        write_at_once(merged, json.dumps(events))
    if options.plot:
        plot(trace, options.plot, options.step)
    if options.json:
        print(json.dumps(as_data(found), indent=1))
    else:
        print(as_text(found))
    return 0
