"""fairscale.nn.pipe.types."""

import torch

from shardkit.pipeline.async_pipe import LazyModule
from shardkit.pipeline.microbatch import Value as TensorOrTensors
from shardkit.redirected import redirected, redirected_names

__all__ = ["InputDevice", "LazyModule", "PipeMessage", "TensorOrTensors", "Tensors"]

Tensors = tuple[torch.Tensor, ...]
InputDevice = int | str | torch.device | None
PipeMessage = redirected(
    "nn.pipe.types.PipeMessage",
    instead="shardkit.nn.pipe.AsyncPipe, or torch.distributed.isend and irecv",
    why="stages send over their process group",
)

__getattr__ = redirected_names(
    __name__,
    [
        "ACTIVATIONS_GRADS_QUEUE",
        "EVENT_LOOP_ACTIVATIONS_QUEUE",
        "EVENT_LOOP_GRADIENTS_QUEUE",
        "EVENT_LOOP_QUEUE",
        "MESSAGE_GENERATION_START",
        "MessageGeneration",
        "PORTAL_QUEUE",
        "SKIP_TENSOR_QUEUE",
    ],
    instead="shardkit.nn.pipe.AsyncPipe, or torch.distributed.isend and irecv",
    why="stages send over their process group",
)
