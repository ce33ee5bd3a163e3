"""fairscale.nn.pipe.checkpoint: the same state as of shardkit.nn.checkpoint."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn

from shardkit.compat.redirected import redirected_names
from shardkit.pipeline.microbatch import Batch
from shardkit.wrapping.activations import call_checkpointed

from .types import TensorOrTensors

__getattr__ = redirected_names(__name__)


class Function(Protocol):
    """What is checkpointed."""

    def __call__(self, input: TensorOrTensors) -> TensorOrTensors: ...


class Checkpointing:
    """A function and its input: :meth:`checkpoint` computes without keeping activations."""

    def __init__(self, function: Function, batch: Batch) -> None:
        self.function = function
        self.batch = batch

    def checkpoint(self) -> Batch:
        """The function's result, whose activations backward computes again."""
        # What parameters the function uses is not known: those of a module are, others as if there were some.
        near = self.function if isinstance(self.function, nn.Module) else _UNKNOWN
        value = call_checkpointed(self.function, (self.batch.value,), {}, near=near)
        return Batch(value, self.batch.index)

    def recompute(self, batch: Batch) -> None:
        """Nothing: backward comes to it by itself."""


_UNKNOWN = nn.ParameterList([nn.Parameter(torch.empty(0))])
