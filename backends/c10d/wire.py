"""Tensors in the form in which a library takes them."""

from __future__ import annotations

import torch

NUMBERS = frozenset(
    {
        torch.float32,
        torch.float64,
        torch.bfloat16,
        torch.float16,
        torch.int64,
        torch.int32,
        torch.uint8,
        torch.int8,
    }
)
"""What every library knows by name; everything else (int16, unsigned 16 to 64 bits, float8, complex numbers) travels as
bytes."""


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """Complex numbers as pairs of real ones, [2 * numel], in the same memory: no library knows complex numbers."""
    return torch.view_as_real(tensor.detach()).view(-1)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """What a contiguous tensor holds, [numel * itemsize], in the same memory."""
    return tensor.detach().view(-1).view(torch.uint8)
