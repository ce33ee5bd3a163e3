"""What many ranks would hold and send (``tests/benchmarks/scale.py``), with two blocks in place of 32."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.started import output_of

WORLDS = (128, 1000, 1024)


@pytest.fixture(scope="module")
def costs() -> dict[str, Any]:
    """World size -> implementation -> figure."""
    command = ["tests/benchmarks/scale.py", "--depth", "2", "--json"]
    return json.loads(output_of(*command, "--world-sizes", ",".join(map(str, WORLDS))).splitlines()[-1])


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
