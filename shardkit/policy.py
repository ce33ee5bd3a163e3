"""Options as frozen dataclasses, checked when they are made."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .errors import ConfigurationError


@dataclass(frozen=True)
class ReducePolicy:
    """How gradients travel to their owners.

    Attributes:
        bucket_numel: most elements that are reduced together; 0 reduces every gradient on its own. One bucket is
            in flight at a time, so this bounds the transient memory of a backward.
        dtype: dtype on the wire; None keeps the gradient's own.
    """

    bucket_numel: int = 2**23
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        if self.bucket_numel < 0:
            raise ConfigurationError(f"bucket_numel is {self.bucket_numel}; it must be 0 or more")
        if self.dtype is not None and not self.dtype.is_floating_point:
            raise ConfigurationError(f"gradients can't be reduced in {self.dtype}; name a floating dtype")
