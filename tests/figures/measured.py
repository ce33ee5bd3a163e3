"""The figures that are asserted: one run of the measuring program for each world size, shared by all tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
IMPLEMENTATIONS = {
    2: "bare,shardkit,balanced,fsdp,fsdp_keep,fully_shard,in_order,dtensors",
    4: "shardkit,balanced,fsdp,fsdp_keep,fully_shard,dtensors,torch_fsdp2",
}
worlds = pytest.mark.parametrize("world_size", [2, 4])
_measured: dict[int, dict[str, Any]] = {}


def measured(world_size: int) -> dict[str, Any]:
    """The figures at that world size, measured in processes of their own."""
    if world_size not in _measured:
        command = [sys.executable, "-m", "tests.figures.measure", "--world-size", str(world_size), "--extras"]
        command += ["--implementations", IMPLEMENTATIONS[world_size]]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=380, check=False
        )
        assert done.returncode == 0, done.stderr[-4000:]
        _measured[world_size] = json.loads(done.stdout.splitlines()[-1])
    return _measured[world_size]


def of(world_size: int, implementation: str, figure: str) -> list[Any]:
    """One figure on each rank."""
    if implementation == "bare":  # the same at every world size
        return [measured(2)["figures"]["bare"][0][figure]] * world_size
    return [rank[figure] for rank in measured(world_size)["figures"][implementation]]


def over_bare(world_size: int, implementation: str, figure: str) -> float:
    """How much more than without a wrapper, on the rank where it is the most."""
    return max(of(world_size, implementation, figure)) - of(world_size, "bare", figure)[0]


def needs_wire(world_size: int) -> None:
    """Skips where the kernel can't count the bytes of these ranks alone."""
    why = measured(world_size)["no_wire"]
    if why:
        pytest.skip(f"no private network here ({why}), so other programs' bytes would be counted")
