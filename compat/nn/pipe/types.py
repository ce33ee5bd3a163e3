"""fairscale.nn.pipe.types."""

import torch

from shardkit.pipeline.async_pipe import LazyModule
from shardkit.pipeline.microbatch import Value as TensorOrTensors
from shardkit.redirected import redirected_names

__all__ = ["InputDevice", "LazyModule", "PipeMessage", "TensorOrTensors", "Tensors"]

Tensors = tuple[torch.Tensor, ...]
InputDevice = int | str | torch.device | None

__getattr__ = redirected_names(__name__)
