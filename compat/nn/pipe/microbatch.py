"""fairscale.nn.pipe.microbatch."""

from __future__ import annotations

from collections.abc import Callable

from shardkit.compat.redirected import redirected_names
from shardkit.pipeline import microbatch
from shardkit.pipeline.microbatch import Batch

from .types import TensorOrTensors

__getattr__ = redirected_names(__name__)


Function = Callable[[TensorOrTensors], TensorOrTensors]


def scatter(input: TensorOrTensors, chunks: int) -> list[Batch]:
    """Micro-batches; see :func:`shardkit.pipeline.microbatch.split`."""
    return [Batch(value, i) for i, value in enumerate(microbatch.split(input, chunks))]


def gather(outputs: list[Batch]) -> TensorOrTensors:
    """The mini-batch of these micro-batches."""
    return microbatch.join([batch.value for batch in outputs])
