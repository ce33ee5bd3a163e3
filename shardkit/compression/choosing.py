"""What is compressed: what is large enough, of which dtypes, on which devices."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ..backend import Backend
from ..errors import ConfigurationError
from ..policy import Compression
from .blocks import BlockFormat

SMALLEST = 1024
"""Numbers of a rank's part below which it travels as it is: of these (norms, biases) there is little to save."""


def check_compressible(
    compression: Compression | None, dtypes: Iterable[torch.dtype], backend: Backend
) -> None:
    """Raises ConfigurationError for what can't be compressed; alike on all ranks, since options and parameters are."""
    if compression is None:
        return
    if not backend.has_storage:
        raise ConfigurationError(
            f"compression={compression}: on {backend.name} all ranks run one compiled program, whose collectives carry "
            "the program's own dtypes; leave compression out there"
        )
    if torch.float64 in dtypes:
        raise _too_wide(compression)


def _too_wide(compression: Compression) -> ConfigurationError:
    return ConfigurationError(
        f"compression={compression}: float64 numbers don't fit into blocks, whose scales are float32; compute in "
        "float32 or less, or leave compression out"
    )


def format_for(compression: Compression | None, numel: int, dtype: torch.dtype) -> BlockFormat | None:
    """The blocks in which a rank's part of so many numbers travels; None: it travels as it is."""
    if compression is None or numel < SMALLEST or not dtype.is_floating_point:
        return None
    if dtype == torch.float64:
        raise _too_wide(compression)
    return BlockFormat(compression.dtype, compression.block)
