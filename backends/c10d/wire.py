"""Tensors in the form in which a library takes them."""

from __future__ import annotations

import torch


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """Complex numbers as pairs of real ones, [2 * numel], in the same memory: no library knows complex numbers."""
    return torch.view_as_real(tensor.detach()).view(-1)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """What a contiguous tensor holds, [numel * itemsize], in the same memory."""
    return tensor.detach().view(-1).view(torch.uint8)
