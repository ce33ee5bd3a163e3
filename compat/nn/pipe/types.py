"""fairscale.nn.pipe.types."""

import torch

from shardkit.compat.redirected import redirected_names

Tensors = tuple[torch.Tensor, ...]
InputDevice = int | str | torch.device | None

__getattr__ = redirected_names(__name__)
