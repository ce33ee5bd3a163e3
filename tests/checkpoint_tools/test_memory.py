"""One tensor is in memory at a time, whatever is converted to what."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.started import output_of, program

LARGEST = 96  # MB, of one tensor
MANY = 25  # tensors of 8 MB

PROGRAM = program("peaks_of_conversions")


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
    peaks = json.loads(output_of(PROGRAM, json.dumps(steps)).splitlines()[-1])
    assert max(peaks.values()) < 1.2 * LARGEST + 100, peaks
