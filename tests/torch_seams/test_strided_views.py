"""Views of flat buffers: any order of dimensions in memory is kept, gaps and overlaps are not."""

from __future__ import annotations

import itertools

import pytest
import torch

from shardkit.torch_seams.tensors import dense_strides, strided_view


@pytest.mark.parametrize("shape", [(), (1,), (4,), (2, 3), (3, 1, 2), (2, 3, 2), (2, 1, 3, 2), (0, 3)])
def test_every_order_of_dimensions(shape: tuple[int, ...]) -> None:
    for order in itertools.permutations(range(len(shape))):
        like = torch.empty([shape[d] for d in order]).permute([order.index(d) for d in range(len(shape))])
        assert like.shape == shape
        flat = torch.zeros(like.numel() + 3)[1:]  # a buffer that is a view itself
        view = strided_view(flat, like, 1)
        assert view.shape == like.shape
        if like.numel():  # without elements any strides will do
            assert view.stride() == like.stride()
        view += 1
        assert flat.tolist() == [0.0] + [1.0] * like.numel() + [0.0]


@pytest.mark.parametrize(
    "like",
    [
        torch.empty(4, 6)[:, ::2],
        torch.empty(3, 1).expand(3, 4),
        torch.empty(5, 4)[:, :3],
        torch.empty(8)[::3],
    ],
)
def test_what_does_not_fill_its_memory_becomes_contiguous(like: torch.Tensor) -> None:
    assert dense_strides(like) == torch.empty(like.shape).stride()
