"""Over what values are gathered, and who hears of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from ...backend import Work

Hears = Callable[
    [torch.Tensor, torch.Tensor], object
]  # of the output [W * S] and this rank's shard [S], before


class Gathers(Protocol):
    """What a store uses of a :class:`~shardkit.backend.Group`."""

    def all_gather_into(
        self, output: torch.Tensor, shard: torch.Tensor, sizes: Sequence[int] | None = None, *,
        async_op: bool = False, label: str = "",
    ) -> Work: ...  # fmt: skip


class HeardChannel:
    """A channel of whose all-gathers somebody hears."""

    def __init__(self, channel: Gathers, hears: Hears) -> None:
        self._channel = channel
        self._hears = hears

    def all_gather_into(
        self, output: torch.Tensor, shard: torch.Tensor, sizes: Sequence[int] | None = None, *,
        async_op: bool = False, label: str = "",
    ) -> Work:  # fmt: skip
        self._hears(output, shard)
        return self._channel.all_gather_into(output, shard, sizes, async_op=async_op, label=label)
