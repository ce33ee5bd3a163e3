"""What updating one parameter costs, by which owners are balanced. Only proportions count."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

Cost = Callable[[object, torch.Size], float]
"""Of an optimizer class and a parameter's shape."""


def cost_of(optimizer_class: object, shape: torch.Size) -> float:
    """Multiplications of a step, roughly, by the name of the class: classes of this kind are in many packages."""
    name = getattr(optimizer_class, "__name__", "").lower()
    numel = float(shape.numel())
    if len(shape) < 2:
        return numel
    if "muon" in name:  # Newton-Schulz iterations: products of [m, n] with [n, m], and of [m, m]
        rows, columns = shape[0], shape.numel() // max(1, shape[0])
        return min(rows, columns) ** 2 * float(max(rows, columns))
    if "shampoo" in name or "soap" in name or "kron" in name:  # roots or eigenvectors for each dimension
        return float(sum(n**3 for n in shape)) + numel * math.fsum(shape)
    return numel
