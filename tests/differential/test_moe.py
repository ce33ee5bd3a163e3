"""Mixture of experts beside the real fairscale, in the same ranks: gates to the last bit, layers, and its faults.

fairscale's own all-to-all works on gloo; it wants fp32, and a number of tokens that the experts divide.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from shardkit.nn import moe
from tests.pools import rank_pool

real = pytest.importorskip("fairscale.nn.moe")
pytestmark = pytest.mark.oracle


@settings(max_examples=40, deadline=None)
@given(
    experts=st.integers(1, 6),
    factor=st.integers(1, 5),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    spread=st.sampled_from([0.0, 0.1, 1.0, 30.0]),
    seed=st.integers(0, 99),
)
def test_gates(experts: int, factor: int, dtype: torch.dtype, spread: float, seed: int) -> None:
    """The same noise from the same seed, and so the same experts."""
    results = []
    for module in (moe, real):
        torch.manual_seed(seed)
        gate = module.Top2Gate(4, experts).to(dtype)
        x = (spread * torch.randn(experts * factor, 4)).to(dtype).requires_grad_()
        l_aux, combine, mask = gate(x)
        (l_aux + (combine * torch.arange(combine.numel()).view_as(combine)).sum()).backward()
        results.append([l_aux, combine, mask, torch.rand(1), x.grad, gate.wg.weight.grad])
    for i, (first, second) in enumerate(zip(*results, strict=True)):
        assert first.dtype == second.dtype
        if i < 4:
            assert torch.equal(first, second)
        else:
            torch.testing.assert_close(
                first, second, rtol=2e-2 if first.dtype.itemsize == 2 else 1e-5, atol=1e-5
            )


def _layers(rank: int, program: tuple[int, int, int, int, int]) -> list[Any]:
    local, tokens, rows, dim, seed = program
    world = torch.distributed.get_world_size()
    results = []
    for module in (moe, real):
        torch.manual_seed(seed)
        gate = module.Top2Gate(dim, world * local)
        torch.manual_seed(1000 * seed + rank)
        experts = nn.ModuleList(nn.Linear(dim, dim) for _ in range(local))
        layer = module.MOELayer(gate, experts if local > 1 or seed % 2 else experts[0])
        x = torch.randn(rows, tokens, dim, requires_grad=True)
        y = layer(x)
        (layer.l_aux + y.pow(2).sum()).backward()
        names = list(layer.state_dict())
        marked = [getattr(p, "expert", None) for p in layer.parameters()]
        gradients = [p.grad for p in layer.parameters()]
        results.append([y.detach(), layer.l_aux.detach(), x.grad, gradients, names, marked])
        assert (layer.world_size, layer.num_local_experts, layer.group) == (
            world,
            local,
            torch.distributed.group.WORLD,
        )
    return results


@pytest.mark.parametrize("world", [1, 2, 3])
@settings(max_examples=6, deadline=None)
@given(local=st.integers(1, 3), factor=st.integers(1, 3), dim=st.integers(1, 5), seed=st.integers(0, 99))
def test_layers(world: int, local: int, factor: int, dim: int, seed: int) -> None:
    program = (local, world * factor, local, dim, seed)  # fairscale wants rows that the local experts divide
    for ours, theirs in rank_pool(world).run(_layers, program):
        assert ours[4:] == theirs[4:]
        torch.testing.assert_close(ours[:4], theirs[:4], rtol=1e-5, atol=1e-6)
