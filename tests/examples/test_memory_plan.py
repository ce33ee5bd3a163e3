"""The memory plan of the transformer example: against closed-form arithmetic, autograd, and what ranks really hold."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from shardkit import FSDP, enable_wrap
from shardkit.examples import vit
from shardkit.examples.digits.model import Block
from shardkit.examples.memory_plan import KEPT_BY_BLOCK, plan
from tests.pools import rank_pool

D, BLOCKS, TOKENS, BATCH = 5120, 32, 256, 8
BLOCK = 12 * D**2 + 13 * D
REST = (3 * 14**2 + 1) * D + TOKENS * D + 2 * D + (D + 1) * 1000  # patches, positions, norm, head


def numbers(text: str) -> dict[str, int]:
    rows = [line.rsplit(maxsplit=3) for line in text.splitlines() if line.endswith("GiB")]
    return {row[0].strip(): int(row[1].replace(",", "")) for row in rows}


@pytest.mark.parametrize(("ranks", "dtype", "size"), [(128, "float32", 4), (1000, "bfloat16", 2)])
def test_ten_billion_parameters(
    ranks: int, dtype: str, size: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        vit.main(["--plan", "--ranks", str(ranks), "--batch_size", str(BATCH), "--compute_dtype", dtype]) == 0
    )
    text = capsys.readouterr().out
    assert text.startswith(f"10,077,917,160 parameters in {BLOCKS + 1} units on {ranks} ranks;")
    assert BLOCKS * BLOCK + REST == 10_077_917_160
    shards = 4 * (BLOCKS * -(-BLOCK // ranks) + -(-REST // ranks))
    gathered = -(-BLOCK // ranks) * ranks * size
    between = BATCH * TOKENS * D * size
    assert numbers(text) == {
        "parameters, sharded": shards,
        "gradients, sharded": shards,
        "Adam's moments, sharded": 2 * shards,
        "largest unit, gathered": gathered,
        f"activations of {BATCH} images": 16 * BLOCKS * between,
        "with gradient checkpointing": (16 + BLOCKS) * between,
    }


def test_activations_of_a_block_are_what_autograd_keeps() -> None:
    batch, tokens, dim = 2, 16, 256
    block = Block(dim, heads=4, qkv_bias=True)
    x = torch.randn(batch, tokens, dim, requires_grad=True)
    of_parameters = {p.untyped_storage().data_ptr() for p in block.parameters()}
    kept = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in of_parameters:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        block(x).sum()
    total = sum(storage.nbytes() for storage in kept.values()) / 4
    # Beside it there are one or two numbers for each row: of the norms and of the softmax.
    assert KEPT_BY_BLOCK <= total / (batch * tokens * dim) < KEPT_BY_BLOCK * 1.01


SMALL = vit.Config(embed_dim=24, num_heads=2, num_blocks=3, image_size=8, patch_size=4, classes=7)


def _held(rank: int) -> tuple[int, int, int, int]:
    """Bytes of parameters, gradients and moments, and number of units, of a real rank after a step."""
    with enable_wrap(wrapper_cls=FSDP, backend="simulated"):
        model = FSDP(vit.VisionTransformer(SMALL), backend="simulated")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.randn(2, 3, 8, 8)).sum().backward()
    optimizer.step()

    def count(tensors: Any) -> int:
        return sum(t.numel() * t.element_size() for t in tensors)

    moments = (values[k] for values in optimizer.state.values() for k in ("exp_avg", "exp_avg_sq"))
    return (
        count(model.parameters()),
        count(p.grad for p in model.parameters()),
        count(moments),
        sum(isinstance(m, FSDP) for m in model.modules()),
    )


@pytest.mark.parametrize("ranks", [2, 3])
def test_real_ranks_hold_what_was_planned(ranks: int) -> None:
    build: Any = partial(vit.VisionTransformer, SMALL)
    planned = plan(build, ranks, torch.float32, activations=(1, 3))
    for rank in rank_pool(ranks, "simulated").run(_held):
        assert rank == (planned.shards, planned.gradients, planned.state, planned.units)
    assert planned.parameters == sum(p.numel() for p in build().parameters())
