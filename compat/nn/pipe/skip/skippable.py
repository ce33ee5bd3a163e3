"""fairscale.nn.pipe.skip.skippable."""

from collections.abc import Generator
from typing import TypeVar

import torch

from shardkit.pipeline.skip import Skippable, StashPop, pop, skippable, stash, verify_skippables
from shardkit.redirected import redirected_names

from ..microbatch import Batch
from ..types import TensorOrTensors, Tensors
from .namespace import Namespace

__all__ = [
    "Batch",
    "Namespace",
    "Skippable",
    "StashPop",
    "StashPopGenerator",
    "T",
    "TensorOrTensors",
    "Tensors",
    "current_skip_tracker",
    "pop",
    "skippable",
    "stash",
    "verify_skippables",
]

__getattr__ = redirected_names(__name__)

StashPopGenerator = Generator[StashPop, torch.Tensor | None, TensorOrTensors]
T = TypeVar("T", bound=Skippable)
