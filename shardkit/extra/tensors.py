"""Memory and dtypes of tensors, under fairscale's names."""

from __future__ import annotations

import contextlib

import torch
from torch.utils._pytree import tree_map_only

from ..types import Args, Kwargs, Tree


def alloc_storage_(data: torch.Tensor, size: torch.Size) -> None:
    """Gives a tensor that owns its storage the memory for ``size``, unless it has it."""
    wanted = size.numel() * data.element_size()
    if data.untyped_storage().size() != wanted:
        data.untyped_storage().resize_(wanted)


def free_storage_(data: torch.Tensor) -> None:
    """Gives the memory of a tensor that owns its storage back."""
    data.untyped_storage().resize_(0)


def cast_floats_to_right_precision(
    to_fp16: bool, no_grad: bool, *args: Tree, **kwargs: Tree
) -> tuple[Args, Kwargs]:
    """Arguments with fp32 tensors cast to fp16, or the other way round.

    Args:
        to_fp16: which way.
        no_grad: cast without autograd, but keep ``requires_grad``.
    """
    source, target = (torch.float32, torch.float16) if to_fp16 else (torch.float16, torch.float32)

    def cast(x: torch.Tensor) -> torch.Tensor:
        if x.dtype is not source:
            return x
        with torch.no_grad() if no_grad else contextlib.nullcontext():
            y = x.to(target)
        return y.requires_grad_(x.requires_grad) if y.is_leaf else y

    return tree_map_only(torch.Tensor, cast, (args, kwargs))  # type: ignore[no-any-return]
