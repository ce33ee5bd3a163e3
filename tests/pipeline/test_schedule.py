"""Which cells run when: every cell once, after all that it depends on, and in as few ticks as possible."""

from __future__ import annotations

import pytest

from shardkit.pipeline.pipe import checkpointed_cells, ticks


@pytest.mark.parametrize("m", range(1, 6))
@pytest.mark.parametrize("n", range(1, 6))
def test_every_cell_has_its_tick(m: int, n: int) -> None:
    tick_of = {cell: k for k, cells in enumerate(ticks(m, n)) for cell in cells}
    assert sum(map(len, ticks(m, n))) == len(tick_of) == m * n
    assert len(list(ticks(m, n))) == m + n - 1
    for (i, j), k in tick_of.items():
        assert 0 <= i < m
        assert 0 <= j < n
        for before in ((i - 1, j), (i, j - 1)):  # the partition is free, the micro-batch has come
            assert tick_of.get(before, -1) < k


def test_what_keeps_no_activations() -> None:
    assert [checkpointed_cells(mode, 4) for mode in ("always", "except_last", "never")] == [4, 3, 0]
