"""fairscale.nn.moe.top2gate."""

from collections.abc import Callable

import torch

from shardkit.moe.gating import Top2Gate, gumbel_rsample, one_hot, top2gating

__all__ = ["Top2Gate", "gumbel_map", "gumbel_rsample", "one_hot", "top2gating"]

gumbel_map: dict[torch.device, Callable] = {}  # nothing is kept: the distribution is two numbers
