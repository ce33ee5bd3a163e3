"""One phase, in the process that ``python -m tests.gpu`` starts for it: prints what it finds as lines of JSON.

python -m tests.gpu.phase bench cuda '{"size": "124M", "variant": "plain"}'
"""

from __future__ import annotations

import json
import os
import platform
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

from tests.gpu.plan import ROW


def _say(row: dict[str, Any]) -> None:
    print(ROW + json.dumps(row), flush=True)


def environment(device: str) -> None:
    """Device and versions."""
    import torch

    import shardkit

    row: dict[str, Any] = {
        "shardkit": shardkit.__version__, "torch": torch.__version__, "Python": platform.python_version(),
        "system": platform.platform(terse=True), "CPU cores": os.cpu_count(),
    }  # fmt: skip
    row["commit"] = _first_line("git", "rev-parse", "--short", "HEAD")
    try:
        import fairscale

        row["fairscale"] = fairscale.__version__
    except ImportError:
        row["fairscale"] = "not installed"
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        row |= {
            "device": properties.name, "devices": torch.cuda.device_count(),
            "memory": f"{properties.total_memory / 2**30:.0f} GiB", "CUDA": torch.version.cuda,
            "NCCL": ".".join(map(str, torch.cuda.nccl.version())),
            "driver": _first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        }  # fmt: skip
    else:
        row["device"] = "CPU (a trial of the program: its times say nothing)"
    _say(row)


def _first_line(*command: str) -> str:
    """Of what a program of the system says."""
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return asked.stdout.split("\n")[0].strip()


def run_pytest(device: str, paths: str, select: str = "", words: str = "") -> None:
    """pytest; a row with its last line, and one for each failure."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--no-header",
        "-p",
        "no:cacheprovider",
        "-rfE",
        *paths.split(),
    ]
    command += ["-m", select] if select else []
    command += ["-k", words] if words else []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            if re.match(r"(FAILED|ERROR) ", line):
                _say({"failed": line.strip()[:300]})
            elif re.match(r"=*\s*\d+ (passed|failed|skipped|error)|=*\s*no tests", line):
                _say({"summary": line.strip(" =\n")})
    if process.returncode:
        sys.exit(1)


def _ranks(device: str, at_least: int = 1) -> Any:
    from shardkit.backends.processes import RankPool

    if device == "cpu":
        return RankPool(max(2, at_least), "gloo", timeout=None, environment={"OMP_NUM_THREADS": "1"})
    import torch

    return RankPool(torch.cuda.device_count(), "cuda", timeout=None)


def alignment(device: str) -> None:
    """What weights and copies cost that begin at odd places."""
    from tests.gpu.parts import alignment as rows

    for row in rows(device):
        _say(row)


def channels(device: str) -> None:
    """What communicators cost, and parts of odd and of uneven sizes."""
    from tests.gpu.parts import channels as measure

    with _ranks(device) as pool:
        for row in pool.run(measure, device)[0]:
            _say(row)


def bench(device: str, size: str, variant: str) -> None:
    """One row for each way of training."""
    import torch

    from tests.gpu import cases
    from tests.gpu.steps import STEPS, measure

    chosen = cases.SIZES[size]
    memory = torch.cuda.get_device_properties(0).total_memory if device == "cuda" else 2**40
    depth = chosen.fitting(memory, cases.VARIANTS[variant])
    with _ranks(device) as pool:
        for way in cases.ways(cases.VARIANTS[variant], device):
            ranks = pool.run(measure, way, size, depth, variant, STEPS if device == "cuda" else 2)
            row = max(ranks, key=lambda r: ("error" in r, r.get("step", 0.0)))  # the slowest rank
            if "error" not in row:
                row["losses"] = [statistics.fmean(v) for v in zip(*(r["losses"] for r in ranks), strict=True)]
            _say(row | {"world": len(ranks)})


PHASES: dict[str, Callable[..., None]] = {
    "environment": environment,
    "tests": run_pytest,
    "alignment": alignment,
    "channels": channels,
    "bench": bench,
}


def rows_in(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """What a phase has found, from its output."""
    for line in lines:
        if line.startswith(ROW):
            yield json.loads(line[len(ROW) :])


if __name__ == "__main__":
    PHASES[sys.argv[1]](sys.argv[2], **json.loads(sys.argv[3]))
