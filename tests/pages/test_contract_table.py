"""docs/TESTING.md's table of the contract suite is the suite's."""

from __future__ import annotations

from pathlib import Path

from tests.backends.contract_programs import CONTRACT
from tests.backends.environments import WORLD_SIZES

_PAGE = Path(__file__).parents[2] / "docs" / "TESTING.md"


def test_environments_and_ranks() -> None:
    text = _PAGE.read_text().partition("## The contract by backend\n")[2].partition("\n## ")[0]
    rows = [line.split("|")[1:3] for line in text.splitlines() if line.startswith("| `")]
    found = {name.strip(" `"): tuple(map(int, ranks.split(","))) for name, ranks in rows}
    assert found == WORLD_SIZES
    assert f"One suite of {len(CONTRACT)} programs" in text
