"""fairscale.nn.moe.top2gate."""

from collections.abc import Callable

import torch

from shardkit.compat.redirected import redirected_names

__getattr__ = redirected_names(__name__)


gumbel_map: dict[torch.device, Callable] = {}  # nothing is kept: the distribution is two numbers
