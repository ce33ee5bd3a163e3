"""What many ranks would hold and send (``tests/benchmarks/scale.py``), with two blocks in place of 32."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
WORLDS = (128, 1000, 1024)


@pytest.fixture(scope="module")
def costs() -> dict[str, Any]:
    """World size -> implementation -> figure."""
    program = [sys.executable, "tests/benchmarks/scale.py", "--depth", "2", "--json"]
    done = subprocess.run(
        [*program, "--world-sizes", ",".join(map(str, WORLDS))],
        cwd=ROOT, capture_output=True, text=True, timeout=400, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("world_size", WORLDS)
def test_nothing_is_above_torch(costs: dict[str, Any], world_size: int) -> None:
    ours, theirs = costs[str(world_size)]["shardkit"], costs[str(world_size)]["torch_fsdp2"]
    for figure in ("parameters", "gradients", "state", "sent", "collectives"):
        assert ours[figure] <= theirs[figure], figure


@pytest.mark.parametrize("world_size", WORLDS)
def test_nothing_is_far_above_the_least(costs: dict[str, Any], world_size: int) -> None:
    ours, least = costs[str(world_size)]["shardkit"], costs[str(world_size)]["least"]
    for figure in ("parameters", "gradients", "state", "sent"):
        assert least[figure] <= ours[figure] * 1.0001, figure
        assert ours[figure] <= 1.01 * least[figure], figure
    assert ours["collectives"] == least["collectives"]
