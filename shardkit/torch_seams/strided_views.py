"""Views of flat buffers that keep the order in which a tensor's elements lie in memory; and of memory as bytes."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from ..layout import Box
from ..types import Tree


def strided_view(flat: torch.Tensor, like: torch.Tensor, offset: int) -> torch.Tensor:
    """Returns a view of ``flat`` at ``offset`` with the shape of ``like``, and its strides where they are dense."""
    return flat.as_strided(like.shape, dense_strides(like), flat.storage_offset() + offset)


def dense_strides(like: torch.Tensor) -> tuple[int, ...]:
    """Returns the tensor's strides where its elements fill their memory (channels-last, say), else contiguous ones."""
    is_dense = storage_order(like.shape, like.stride()) is not None
    return like.stride() if is_dense else contiguous_strides(like.shape)


def storage_order(shape: Sequence[int], strides: Sequence[int]) -> list[int] | None:
    """Returns dimensions in the order in which a tensor without gaps lies in memory; None: it has gaps, or overlaps."""
    order = sorted(range(len(shape)), key=lambda d: (-strides[d], d))
    expected = 1
    for d in reversed(order):
        if shape[d] != 1:
            if strides[d] != expected:
                return None
            expected *= shape[d]
    return order


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the strides of a tensor whose elements lie in row-major order."""
    strides = [1] * len(shape)
    for i in range(len(shape) - 2, -1, -1):
        strides[i] = strides[i + 1] * max(shape[i + 1], 1)
    return tuple(strides)


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Returns the bytes of a contiguous tensor on the host, without numpy and without a copy."""
    size = tensor.numel() * tensor.itemsize
    memory: Tree = (ctypes.c_char * size).from_address(tensor.data_ptr())
    memory.owner = tensor  # a view of memory outlives the tensor, and this keeps it
    return memoryview(memory).cast("B")


def narrowed(tensor: torch.Tensor, box: Box, frame: Box) -> torch.Tensor:
    """Returns a view of what is in one box, of a tensor that is what is in another, ``frame``, around it."""
    for dim, (first, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        tensor = tensor.narrow(dim, first - frame.offsets[dim], size)
    return tensor
