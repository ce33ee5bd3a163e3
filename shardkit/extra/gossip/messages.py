"""Several tensors as one message."""

from __future__ import annotations

import logging

import torch

from ...types import AnyCallable


def flatten_tensors(tensors: list[torch.Tensor]) -> torch.Tensor:
    """A new vector of all elements; the tensors have one dtype."""
    return torch.cat([t.reshape(-1) for t in tensors])


def unflatten_tensors(flat: torch.Tensor, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Views of a vector in the shapes of these tensors."""
    pieces = flat.split([t.numel() for t in tensors])
    return [piece.view(t.shape) for piece, t in zip(pieces, tensors, strict=True)]


def group_by_dtype(tensors: list[torch.Tensor]) -> dict[torch.dtype, list[torch.Tensor]]:
    """The tensors of each dtype, in order."""
    groups: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.dtype, []).append(tensor)
    return groups


def communicate(
    tensors: list[torch.Tensor],
    communication_op: AnyCallable,
    logger: logging.Logger | None = None,
) -> None:
    """Calls ``communication_op(tensor=flat)`` once for each dtype and writes back what it made of ``flat``."""
    for same in group_by_dtype(tensors).values():
        with torch.no_grad():
            flat = flatten_tensors(same)
            communication_op(tensor=flat)
            for tensor, new in zip(same, unflatten_tensors(flat, same), strict=True):
                tensor.copy_(new)
        if logger is not None:
            logger.debug("communicated %d tensors of %s", len(same), flat.dtype)
