"""fairscale.experimental.nn.mevo: projection, softmax and loss of a large vocabulary in little memory."""

from __future__ import annotations

import torch
from torch import nn

from shardkit.errors import ConfigurationError
from shardkit.redirected import redirected_names

DEBUG = False  # fairscale's; nothing is printed here

__getattr__ = redirected_names(__name__)


def get_data(
    shape: tuple[tuple[int, int], tuple[int, int]],
    dtype: torch.dtype = torch.float16,
    device: str = "cuda",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random input [tokens, D], weight [words, D] and targets [tokens] of shape ((tokens, D), (D, words))."""
    (tokens, width), (same_width, words) = shape
    if width != same_width:
        raise ConfigurationError(f"shapes {shape[0]} and {shape[1]} can't be multiplied")
    input = torch.rand(tokens, width, device=device, dtype=dtype).requires_grad_(True)
    weight = nn.Linear(width, words, bias=False, device=device, dtype=dtype).weight
    return input, weight, torch.randint(words, (tokens,), device=device)
