"""Meta tensors where devices do otherwise: attention without its matrix, and checks of values that pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from unittest import mock

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from ...types import Args, Kwargs, Tree

_attention = F.scaled_dot_product_attention
_ALL = (torch.all, torch.Tensor.all)
_ANY = (torch.any, torch.Tensor.any)


class _ChecksPass(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Tree], types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> Tree:
        result = func(*args, **(kwargs or {}))
        is_check = (func in _ALL or func in _ANY) and isinstance(result, torch.Tensor)
        if is_check and result.is_meta and not result.dim():
            return torch.tensor(func in _ALL, device="cpu")
        return result


@contextmanager
def as_on_devices(on_host: bool) -> Iterator[None]:
    """Inside, meta tensors do what tensors of a device would.

    - ``scaled_dot_product_attention`` keeps its inputs, its output and one number for each row. For meta tensors torch
      would choose operations that make the matrix of all queries and keys, which no device does that has a fused one.
    - Code that asks whether a condition holds for all values, or for any (is there padding? is something NaN?), finds
      that it does, or that it doesn't.

    Args:
        on_host: the device is a CPU, whose fused attention knows no dropout.
    """
    attention = partial(_fused, knows_dropout=not on_host)
    # no function mode: what a backward computes again is called without
    with mock.patch.object(F, "scaled_dot_product_attention", attention), _ChecksPass():
        yield


def _fused(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    *, knows_dropout: bool,
) -> Tree:  # fmt: skip
    fits = query.is_meta and query.dim() == 4 and query.shape[-1] == value.shape[-1]
    if not fits or (dropout_p and not knows_dropout) or (attn_mask is not None and attn_mask.requires_grad):
        return _attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        attn_mask = torch.empty((), dtype=query.dtype, device="meta").expand(attn_mask.shape)
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
    )[0]
