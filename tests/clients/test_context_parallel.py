"""Sequences that are cut over ranks, as torch's context parallelism and DeepSpeed's Ulysses cut them.

torch's own attention over a ring has kernels for GPUs alone; what a model does in its place on CPUs is written here.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tests.pools import rank_pool

HEADS, WIDTH, LENGTH, WORDS = 4, 16, 8, 32


class Attention(nn.Module):
    """Attends to all of a sequence, of which this rank may have a part; [B, L, WIDTH] -> [B, L, WIDTH]."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.ranks: dist.ProcessGroup | None = None
        self.swaps_heads = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        if self.ranks is None:
            found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        elif self.swaps_heads:  # all of the sequence for some heads
            q, k, v = (self._swap(t, 1, 2) for t in (q, k, v))
            found = self._swap(F.scaled_dot_product_attention(q, k, v, is_causal=True), 2, 1)
        else:  # keys and values of all
            k, v = (functional.all_gather_tensor_autograd(t.contiguous(), 2, self.ranks) for t in (k, v))
            at = self.ranks.rank() * x.shape[1] + torch.arange(x.shape[1])
            mask = at[:, None] >= torch.arange(k.shape[2])
            found = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(found.transpose(1, 2).flatten(2))

    def _swap(self, t: torch.Tensor, cut: int, joined: int) -> torch.Tensor:
        assert self.ranks is not None
        ones = [1] * self.ranks.size()
        parts = torch.stack([part.contiguous() for part in t.chunk(len(ones), cut)])
        return torch.cat(
            functional.all_to_all_single_autograd(parts, ones, ones, self.ranks).unbind(0), joined
        )


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(WORDS, WIDTH), Attention(), Attention(), nn.Linear(WIDTH, WORDS))


def _train(model: nn.Module, rows: slice, columns: slice) -> list[tuple[float, float]]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for step in range(3):
        tokens = torch.randint(0, WORDS, (4, LENGTH + 1), generator=torch.Generator().manual_seed(step))[rows]
        logits = model(tokens[:, :-1][:, columns])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:][:, columns].flatten())
        loss.backward()
        norm: Any = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        found.append(
            (loss.item(), norm.full_tensor().item() if hasattr(norm, "full_tensor") else norm.item())
        )
        optimizer.step()
        optimizer.zero_grad()
    return found


def _parallel(rank: int, swaps_heads: bool, sharded_over: str) -> list[tuple[float, float]]:
    import shardkit

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "context"))
    over = mesh if sharded_over == "context" else mesh["data", "context"]._flatten(sharded_over)
    model = _model()
    for module in (model[1], model[2], model):
        shardkit.fully_shard(module, mesh=over)
    for attention in model[1:3]:
        attention.ranks, attention.swaps_heads = mesh["context"].get_group(), swaps_heads  # type: ignore[assignment]
    data, context = divmod(rank, 2)
    half = LENGTH // 2
    return _train(model, slice(2 * data, 2 * data + 2), slice(context * half, (context + 1) * half))


@pytest.mark.parametrize("sharded_over", ["data and context", "context"])
def test_parts_of_sequences_train_as_whole_ones(sharded_over: str) -> None:
    want = torch.tensor(_train(_model(), slice(None), slice(None)))
    for swaps_heads in (False, True):
        found = torch.tensor(rank_pool(4).run(_parallel, swaps_heads, sharded_over))
        torch.testing.assert_close(found[:, :, 0].mean(0), want[:, 0])
        torch.testing.assert_close(found[:, :, 1], want[:, 1].expand(4, -1))
