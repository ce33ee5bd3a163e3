"""Who writes, and who reads: the same bits, the state of optimizers and the next step included."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pools import rank_pool
from tests.training_checkpoints.programs import assert_same, content, read, write

WRITERS = [
    ("plain", 1),
    ("fsdp", 3),
    ("fully_shard", 2),
    ("oss", 2),
    ("hybrid", 4),
    ("torch_fsdp", 2),
    ("whole", 2),
    ("two_fsdp", 3),
]
READERS = {
    "plain": [("fsdp", 2), ("ddp", 2)],
    "fsdp": [("fsdp", 4), ("oss", 3), ("fsdp2", 2), ("fully_shard", 3)],
    "fully_shard": [("fully_shard", 3), ("whole", 2), ("dtensors", 2), ("plain", 1)],
    "oss": [("oss", 4), ("oss", 1), ("fairscale", 2), ("fsdp2", 2)],
    "hybrid": [("fsdp", 2), ("hybrid", 4)],
    "torch_fsdp": [("torch_fsdp", 3), ("plain", 1)],
    "whole": [("whole", 3), ("fsdp", 2)],
    "two_fsdp": [("two_fsdp", 2), ("two_oss", 2), ("two_plain", 1), ("two_fsdp2", 2)],
}
# read by their own kind
ALONE = [
    ("whole_muon", 2, 3),
    ("adascale", 2, 2),
    ("fsdp2", 2, 4),
    ("dtensors", 2, 2),
]


def _check(folder: Path, kind: str, ranks: int, readers: list[tuple[str, int]]) -> None:
    rank_pool(ranks).run(write, str(folder), kind)
    before, after = content(folder / "a"), content(folder / "b")
    for reader, world in readers:
        name = f"{reader}{world}"
        rank_pool(world).run(read, str(folder), reader, name)
        assert_same(content(folder / f"{name}-a"), before)
        assert_same(content(folder / f"{name}-b"), after, exact=ranks == world and reader == kind)


@pytest.mark.parametrize(("kind", "ranks"), WRITERS)
def test_everybody_reads(kind: str, ranks: int, tmp_path: Path) -> None:
    _check(tmp_path, kind, ranks, READERS[kind])


@pytest.mark.parametrize(("kind", "ranks", "readers"), ALONE)
def test_their_own(kind: str, ranks: int, readers: int, tmp_path: Path) -> None:
    _check(tmp_path, kind, ranks, [(kind, readers)])
