"""Norms over ranks are those of all gradients in one process, of every order and wherever the gradients are."""

from __future__ import annotations

import math

import pytest
import torch

from shardkit.backend import get_backend
from shardkit.reduction.shard_gradients import Portion, clip_by_global_norm, combined, local_norm, norm_like
from tests.pools import on_ranks

ORDERS = [0.0, 0.5, 1.0, 2.0, 3.0, math.inf, -math.inf, -1.0]
WORLD = 3


def _gradients(rank: int) -> list[torch.Tensor]:
    """Those of a rank; the last rank has none, and what rank -1 has they all have."""
    shapes = {-1: [(2,)], 0: [(3, 2), ()], 1: [(4,)]}.get(rank, [])
    generator = torch.Generator().manual_seed(rank + 1)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


@on_ranks((WORLD, "simulated"))
def test_norms_of_every_order(rank: int) -> None:
    group = get_backend("simulated").group(None)
    like = torch.zeros((), dtype=torch.float64)
    for order in ORDERS:
        everything = [g for r in range(-1, WORLD) for g in _gradients(r)]
        expected = torch.nn.utils.get_total_norm(everything, order)
        for max_norm in (0.1, 100.0):
            mine, alike = _gradients(rank), _gradients(-1)
            portions = [Portion(mine, (group,)), Portion(alike, ())]
            total = clip_by_global_norm(portions, mine + alike, like, max_norm, order)
            torch.testing.assert_close(total, expected)
            factor = min(1.0, max_norm / (float(expected) + 1e-6))
            for clipped, before in zip(mine + alike, _gradients(rank) + _gradients(-1), strict=True):
                torch.testing.assert_close(clipped, before * factor)


@on_ranks((2, "simulated"))
def test_an_overflow_of_one_rank_is_one_of_all(rank: int) -> None:
    group = get_backend("simulated").group(None)
    gradients = [torch.tensor([math.inf if rank == 0 else 1.0])]
    with pytest.raises(RuntimeError, match="total norm of order 2"):
        clip_by_global_norm(
            [Portion(gradients, (group,))], gradients, torch.zeros(()), 1.0, 2.0, error_if_nonfinite=True
        )


@pytest.mark.parametrize("order", ORDERS)
def test_norms_of_parts(order: float) -> None:
    parts, like = [_gradients(0), _gradients(1), []], torch.zeros((), dtype=torch.float64)
    norms = [local_norm(part, order, like) for part in parts]
    expected = torch.nn.utils.get_total_norm([g for part in parts for g in part], order)
    torch.testing.assert_close(combined(norms, order), expected)


def test_sparse_gradients_count_with_what_stands_twice_summed() -> None:
    twice = torch.sparse_coo_tensor(torch.tensor([[1, 1, 3]]), torch.tensor([1.0, 2.0, 4.0]), (5,))
    assert local_norm([twice], 2.0, torch.zeros(())) == 5.0


def test_the_dtype_of_norms() -> None:
    kinds = {
        torch.float32: [torch.float16, torch.bfloat16],
        torch.float64: [torch.float32, torch.complex128],
    }
    for expected, dtypes in kinds.items():
        assert norm_like([torch.zeros(1, dtype=dtype) for dtype in dtypes]).dtype is expected
    for dtype in (torch.bfloat16, torch.float64):  # a rank that has none gives that of ``like``, too
        assert local_norm([torch.ones(2, dtype=dtype)], 2.0, torch.zeros(())).dtype is torch.float32
