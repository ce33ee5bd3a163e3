"""Runs all that needs a GPU, and writes a report.

    python -m tests.gpu                      # at most 25 minutes; writes docs/GPU.md
    python -m tests.gpu --only 'bench 124M'  # phases whose name begins so
    python -m tests.gpu --device cpu --output /tmp/report   # tries the program itself: no GPU, smallest size

Each phase is a process of its own with a time limit: a hang costs one phase.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.gpu.phase import rows_in
from tests.gpu.plan import Phase, plan
from tests.gpu.report import write

ROOT = Path(__file__).parents[2]


def run_phase(phase: Phase, device: str, limit: float) -> dict[str, Any]:
    """What it found, and how it ended."""
    print(f"== {phase.name} (at most {limit:.0f} s)", flush=True)
    began = time.monotonic()
    command = [sys.executable, "-m", "tests.gpu.phase", phase.kind, device, json.dumps(phase.arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            ended = "ok" if process.wait(limit) == 0 else f"failed (exit code {process.returncode})"
        except subprocess.TimeoutExpired:
            ended = "time limit"
        finally:  # its ranks too
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        output.seek(0)
        lines = output.readlines()
    found = list(rows_in(iter(lines)))
    seconds = time.monotonic() - began
    print(f"   {ended}, {seconds:.0f} s, {len(found)} rows", flush=True)
    if ended != "ok":
        print("".join(line for line in lines[-40:]), flush=True)
    return {"name": phase.name, "kind": phase.kind, "ended": ended, "seconds": seconds, "rows": found}


def _devices() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--minutes", type=float, default=25.0, help="for everything")
    parser.add_argument("--only", default="", help="beginnings of the names of phases, separated by commas")
    parser.add_argument("--output", type=Path, help="folder of GPU.md; default: docs")
    options = parser.parse_args()
    devices = _devices()
    if options.device == "cuda" and not devices:
        print(
            "no GPU is visible (torch.cuda.is_available() is False); --device cpu tries the program without one"
        )
        return 2
    if options.device == "cpu" and options.output is None:
        print("--device cpu needs --output FOLDER: docs/GPU.md is for what a GPU has shown")
        return 2
    end = time.monotonic() + 60 * options.minutes
    phases, skipped = plan(options.device, devices)
    for line in skipped:
        print(f"skipped: {line}")
    results: list[dict[str, Any]] = []
    for phase in phases:
        if options.only and not phase.name.startswith(tuple(options.only.split(","))):
            continue
        left = end - time.monotonic()
        if left < 20:
            skipped.append(f"{phase.name}: the {options.minutes:g} minutes were over")
            print(f"skipped: {skipped[-1]}")
            continue
        results.append(run_phase(phase, options.device, min(phase.limit, left)))
    path = write(options.output or ROOT / "docs", options.device, results, skipped)
    print(f"written: {path}")
    return 0 if all(r["ended"] == "ok" for r in results) else 1


if __name__ == "__main__":
    sys.exit(main())
