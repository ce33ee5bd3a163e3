"""Who writes, and who reads: the same bits, the state of optimizers and the next step included."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pools import rank_pool
from tests.training_checkpoints.programs import assert_same, content, read, write

READERS = [("fsdp", 2), ("fully_shard", 4), ("oss", 3), ("fsdp2", 2), ("plain", 1)]


@pytest.mark.parametrize(("kind", "ranks"), [("fsdp", 3)])
def test_everybody_reads(kind: str, ranks: int, tmp_path: Path) -> None:
    rank_pool(ranks).run(write, str(tmp_path), kind)
    before, after = content(tmp_path / "a"), content(tmp_path / "b")
    for reader, world in READERS:
        name = f"{reader}{world}"
        rank_pool(world).run(read, str(tmp_path), reader, name)
        assert_same(content(tmp_path / f"{name}-a"), before)
        assert_same(content(tmp_path / f"{name}-b"), after, exact=False)
