"""An order between parts of a backward that share no tensor."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from shardkit.nn.pipe.dependency import fork, get_phony, join

HOST = torch.device("cpu")


class Noted(torch.autograd.Function):
    """Notes when backward comes by."""

    @staticmethod
    def forward(ctx: Any, number: int, order: list[int], x: torch.Tensor) -> torch.Tensor:
        ctx.number, ctx.order = number, order
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        ctx.order.append(ctx.number)
        return None, None, grad


@pytest.mark.parametrize("tied", [True, False])
def test_backward_comes_to_the_joined_part_first(tied: bool) -> None:
    """Without the edge autograd takes what was computed last first, so the part that waits is computed first here."""
    a, b = (torch.rand(1, requires_grad=True) for _ in range(2))
    order: list[int] = []
    second = Noted.apply(2, order, b * 1)
    first = Noted.apply(1, order, a * 1)
    if tied:
        first, phony = fork(first)
        second = Noted.apply(2, order, join(second, phony))
        order.clear()
    (first + second).backward()
    assert (order[0] == 2) == tied
    assert a.grad == b.grad == 1


@pytest.mark.parametrize("requires_grad", [True, False])
def test_gradients_flow_as_without(requires_grad: bool) -> None:
    x = torch.rand(2, requires_grad=requires_grad)
    y, phony = fork(x)
    assert (phony.requires_grad, y.requires_grad) == (requires_grad, requires_grad)
    assert join(torch.rand(2), phony).requires_grad == requires_grad
    with torch.no_grad():
        same, phony = fork(x)
        assert same is x
        assert not phony.requires_grad
        assert join(x, phony) is x


def test_nothing_keeps_the_graph() -> None:
    x = Noted.apply(1, [], torch.rand(1, requires_grad=True))
    graph = weakref.ref(x.grad_fn)
    x, phony = fork(x)
    join(x, phony).backward()
    del x, phony
    gc.collect()
    assert graph() is None


def test_a_phony_is_empty_and_kept() -> None:
    phony = get_phony(HOST, requires_grad=False)
    assert phony.size() == (0,)
    assert get_phony(HOST, requires_grad=False) is phony
    assert get_phony(HOST, requires_grad=True).requires_grad
