"""FSDP on CUDA devices against one process on the CPU; one device shows all but the communication."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from shardkit import FSDP, PrecisionPolicy
from shardkit.backend import get_backend
from tests.backends import cuda_programs as programs
from tests.pools import on_ranks, rank_pool

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a CUDA device"),
]
worlds = pytest.mark.parametrize(
    "world_size",
    [
        1,
        pytest.param(
            2,
            marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 CUDA devices"),
        ),
    ],
)


@worlds
@pytest.mark.parametrize("options", programs.OPTIONS)
@pytest.mark.parametrize("name", ["tied_across", "checkpoint_reentrant", "adapted", "twice", "attention"])
def test_trains_as_one_process(name: str, options: str, world_size: int) -> None:
    rank_pool(world_size, "cuda").run(programs.train_fsdp, world_size, name, options)


@on_ranks((1, "cuda"))
def test_memory_of_resharded_units_is_given_back(rank: int) -> None:
    """Parameters that are not gathered have no memory."""
    device = get_backend("cuda").device()
    gc.collect()
    others = torch.cuda.memory_allocated()  # what earlier tests have left in this rank
    model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(8)]).to(device)
    for i in range(8):
        model[i] = FSDP(model[i], precision=PrecisionPolicy(compute=torch.bfloat16))
    model = FSDP(model)
    x = torch.randn(4, 1024, device=device)
    for _ in range(3):
        model(x).float().sum().backward()
        model.zero_grad()
    torch.cuda.synchronize()
    shards = sum(p.numel() * 4 for p in model.parameters())
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    assert before - others < shards * 1.1 + 2**22, (before, others, shards)
    with torch.no_grad():
        model(x)
    peak = torch.cuda.max_memory_allocated() - before
    assert peak < 2 * 1024 * 1024 * 2 * 1.3 + 2**22  # one unit that computes and one that is being gathered
