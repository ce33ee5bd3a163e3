"""fairscale.nn.pipe.types."""

import torch

from shardkit.pipeline.async_pipe import LazyModule
from shardkit.pipeline.microbatch import Value as TensorOrTensors
from shardkit.redirected import redirected

__all__ = ["InputDevice", "LazyModule", "PipeMessage", "TensorOrTensors", "Tensors"]

Tensors = tuple[torch.Tensor, ...]
InputDevice = int | str | torch.device | None
PipeMessage = redirected(
    "nn.pipe.types.PipeMessage",
    instead="shardkit.nn.pipe.AsyncPipe, or torch.distributed.isend and irecv",
    why="stages send over their process group",
)
