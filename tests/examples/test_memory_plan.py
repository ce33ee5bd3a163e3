"""The memory plan of the transformer example: the estimate of it, against closed-form arithmetic."""

from __future__ import annotations

import pytest

import vit
from shardkit.tracing.tables import in_bytes

D, BLOCKS, TOKENS, BATCH = 5120, 32, 256, 8
BLOCK = 12 * D**2 + 13 * D
REST = (3 * 14**2 + 1) * D + TOKENS * D + 2 * D + (D + 1) * 1000  # patches, positions, norm, head


@pytest.mark.parametrize(("ranks", "dtype", "size"), [(128, "float32", 4), (1000, "bfloat16", 2)])
def test_ten_billion_parameters(
    ranks: int, dtype: str, size: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        vit.main(["--plan", "--ranks", str(ranks), "--batch_size", str(BATCH), "--compute_dtype", dtype]) == 0
    )
    title, head, _, row = capsys.readouterr().out.splitlines()
    assert title.startswith("vit: 10,077,917,160 parameters;")
    assert BLOCKS * BLOCK + REST == 10_077_917_160
    shards = 4 * (BLOCKS * -(-BLOCK // ranks) + -(-REST // ranks))
    assert f"{ranks:,}" in row.split()
    assert in_bytes(shards) in row  # parameters
    assert in_bytes(2 * shards) in row  # Adam's moments
    # at the peak the last two blocks and what is no block's are gathered
    assert in_bytes((2 * BLOCK + REST) * size) in row
    assert "activations" in head
