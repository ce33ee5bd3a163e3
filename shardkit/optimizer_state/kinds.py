"""Kinds of states of an optimizer: one element for each of a parameter's, or anything else, such as a number."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..types import Tree

# What torch's optimizers keep as one number for a parameter, were the parameter one number itself.
NUMBERS = ("step", "mu", "eta", "mu_product")


def is_elementwise(key: object, value: object, shape: Sequence[int]) -> bool:
    """Whether a state has one element for each of a parameter's, or of a shard's, of this shape.

    Every decision to gather, cut or reshape a state is this one.
    """
    if not isinstance(value, torch.Tensor) or value.numel() != math.prod(shape):
        return False
    return value.dim() > 0 or (len(shape) == 0 and key not in NUMBERS)


def to_cpu(value: object) -> Tree:
    """Copies tensors inside nested containers to the CPU, detached; everything else stays as it is."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {k: to_cpu(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(to_cpu(v) for v in value)
    return value


class StateKind(NamedTuple):
    """The description of a state that ranks send each other.

    Attributes:
        spread: it has one element for each of the shard's.
        dtype: of a tensor.
        shape: of a tensor of one number.
        value: of all else that is not spread: the number, or what it is.
    """

    spread: bool
    dtype: torch.dtype | None
    shape: Sequence[int] | None
    value: Any

    @classmethod
    def of(cls, key: object, value: object, shape: Sequence[int]) -> StateKind:
        """Describes a state of a shard of this shape."""
        if not isinstance(value, torch.Tensor):
            return cls(False, None, None, value)
        if is_elementwise(key, value, shape):
            return cls(True, value.dtype, None, None)
        if value.numel() == 1:
            return cls(False, value.dtype, tuple(value.shape), value.item())
        return cls(False, None, None, to_cpu(value))

    def made(self) -> Tree:
        """Returns the value, a tensor again if it was one."""
        if self.shape is None:
            return copy.deepcopy(self.value)
        return torch.tensor(self.value, dtype=self.dtype).view(self.shape)
