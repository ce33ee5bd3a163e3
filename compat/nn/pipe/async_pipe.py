"""fairscale.nn.pipe.async_pipe."""

from __future__ import annotations

from torch import nn

from shardkit.compat.redirected import redirected_names
from shardkit.pipeline import partition

from .types import LazyModule

__getattr__ = redirected_names(__name__)


def check_balance(module: nn.Sequential | list[LazyModule], balance: list[int]) -> None:
    """Raises BalanceError (a ValueError) for numbers of layers that don't fit."""
    partition.check_balance(len(module), balance, len(balance), "ranks")


def verify_module(module: nn.Sequential | list[LazyModule]) -> None:
    """Raises ConfigurationError (a ValueError) for a layer that is there twice."""
    partition.verify_distinct(module)
