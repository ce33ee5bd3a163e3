"""One tensor is in memory at a time, whatever is converted to what."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

LARGEST = 96  # MB, of one tensor
MANY = 25  # tensors of 8 MB

PROGRAM = """
import json, sys
import shardkit.tools.cli

def peak():
    # not ru_maxrss, which begins with that of the process that started this one
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) / 1024

import torch
torch.set_num_threads(1)
before = peak()
found = {}
for name, arguments in json.loads(sys.argv[1]).items():
    status = shardkit.tools.cli.main(["ckpt", *arguments])
    assert status == 0, (name, status)
    found[name] = peak() - before
    print(name, found[name], file=sys.stderr)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak begins anew
print(json.dumps(found))
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """In memory where that can be: a disk that syncs 2 GB says nothing here."""
    above = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(dir=above) as path:
        yield Path(path)


def test_peaks(folder: Path) -> None:
    state = {f"layers.{k}.weight": torch.randn(1000, 2000) for k in range(MANY)}
    state["embedding"] = torch.randn(LARGEST // 4 * 1000, 1000).t()
    dcp.save({"model": state}, checkpoint_id=str(folder / "source"), no_dist=True)
    chain = ["source"]
    options = {
        "torch": [], "dcp": [], "hf": ["--dtype", "bf16", "--max-shard-size", "90MB"], "fairscale": ["--ranks", "3"],
        "xla": ["--ranks", "2"],
    }  # fmt: skip
    steps = {"verify torch's": ["verify", str(folder / "source")]}
    for k, (kind, more) in enumerate(options.items()):
        chain.append(str(k))
        steps[kind] = ["convert", *(str(folder / c) for c in chain[-2:]), "--to", kind, *more]
    steps["diff"] = ["diff", str(folder / "3"), str(folder / "4")]
    steps["verify"] = ["verify", str(folder / "1")]
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(steps)], capture_output=True, text=True, timeout=400
    )
    assert result.returncode == 0, result.stderr
    peaks = json.loads(result.stdout.splitlines()[-1])
    assert max(peaks.values()) < 1.2 * LARGEST + 100, peaks
