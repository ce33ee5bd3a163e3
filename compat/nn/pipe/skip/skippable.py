"""fairscale.nn.pipe.skip.skippable."""

from collections.abc import Generator
from typing import TypeVar

import torch

from shardkit.compat.redirected import redirected_names
from shardkit.pipeline.microbatch import Value as TensorOrTensors
from shardkit.pipeline.skip import Skippable, StashPop

__getattr__ = redirected_names(__name__)

StashPopGenerator = Generator[StashPop, torch.Tensor | None, TensorOrTensors]
T = TypeVar("T", bound=Skippable)
