"""Model parallelism on CUDA devices: against the unsharded modules, and where its random numbers come from."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from shardkit import model_parallel as mp
from shardkit.backend import get_backend
from tests.backends.environments import environments
from tests.pools import on_ranks

WORLDS = environments("cuda")[:2]


@on_ranks(*WORLDS)
def test_layers(rank: int, world_size: int) -> None:
    device = get_backend("cuda").device()
    mp.initialize_model_parallel(world_size)
    try:
        torch.manual_seed(7)
        plain: Any = nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 16)).double()
        up = mp.ColumnParallelLinear(8, 12, gather_output=False).double()
        down = mp.RowParallelLinear(12, 16, input_is_parallel=True).double()
        with torch.no_grad():
            up.weight.copy_(plain[0].weight.chunk(world_size)[rank])
            up.bias.copy_(plain[0].bias.chunk(world_size)[rank])
            down.weight.copy_(plain[2].weight.chunk(world_size, 1)[rank])
            down.bias.copy_(plain[2].bias)
        x, target = torch.randn(5, 8, dtype=torch.float64), torch.randint(16, (5,))
        F.cross_entropy(plain(x), target).backward()
        model = nn.Sequential(up, nn.GELU(), down).to(device)
        y = mp.checkpoint(model, x.to(device))
        part = mp.scatter_to_model_parallel_region(y)
        mp.vocab_parallel_cross_entropy(part, target.to(device)).mean().backward()
        expected = [
            plain[0].weight.grad.chunk(world_size)[rank],
            plain[0].bias.grad.chunk(world_size)[rank],
            plain[2].weight.grad.chunk(world_size, 1)[rank],
            plain[2].bias.grad,
        ]
        for p, grad in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(p.grad.cpu(), grad)
    finally:
        mp.destroy_model_parallel()


@on_ranks(*WORLDS)
def test_random(rank: int, world_size: int) -> None:
    device = get_backend("cuda").device()
    mp.initialize_model_parallel(world_size)
    try:
        mp.model_parallel_cuda_manual_seed(11)
        with mp.get_cuda_rng_tracker().fork():
            inside = torch.rand(3, device=device)
        outside = torch.rand(3, device=device)
        for seed, drawn in ((11 + 2718 + rank, inside), (11, outside)):
            torch.cuda.manual_seed(seed)
            assert torch.equal(torch.rand(3, device=device), drawn)
    finally:
        mp.get_cuda_rng_tracker().reset()
        mp.destroy_model_parallel()
