"""A rank's shards in state dicts: how they are cut, named, padded and shaped.

Legend: S numel of a shard here, R numel of the saved one (they differ where there is one rank only).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from shardkit.checkpoint.tools.rank_files import shard_name
from shardkit.fsdp.registered import Registered
from shardkit.layout import ShardLayout

Entries = MutableMapping[str, torch.Tensor]


class PaddedCut(NamedTuple):
    """Cuts parameters into whole rows, or into parts that are padded to a multiple of so many elements."""

    multiple: int
    by_rows: bool

    def unit_of(self, size: torch.Size) -> int:
        return max(1, size[1:].numel()) if self.by_rows and size else self.multiple

    def layout(self, shapes: Sequence[torch.Size], world_size: int) -> ShardLayout:
        """Serves as ``Options.layout``. One rank's shard is not cut; state dicts add the padding."""
        numels = tuple(shape.numel() for shape in shapes)
        return ShardLayout(numels, world_size, 1 if world_size == 1 else self.unit_of(shapes[0]))


@dataclass
class Shard:
    """One of a wrapper's flat parameters.

    Attributes:
        listed: where nn.Module finds its shard, as a path within the wrapper.
        original: the same as state dicts have it.
        rows: shape of a row where shards are rows, else None.
        numel: R.
    """

    flat: Registered
    listed: str
    original: str
    size: torch.Size
    rows: torch.Size | None
    numel: int

    @property
    def name(self) -> str:
        return shard_name(self.original)

    def saved(self, shard: torch.Tensor) -> torch.Tensor:
        """Returns a shard [S] in the shape that is saved."""
        shard = shard.reshape(-1)
        if shard.numel() < self.numel:
            shard = torch.cat([shard, shard.new_zeros(self.numel - shard.numel())])
        return shard if self.rows is None else shard.view(-1, *self.rows)

    def loaded(self, saved: torch.Tensor) -> torch.Tensor:
        """Does the reverse; a shard of another world size stays as it is, for nn.Module to refuse."""
        now = self.flat.param
        if saved.numel() == self.numel and saved.numel() >= now.numel():
            return saved.reshape(-1)[: now.numel()].view(now.shape)
        return saved


def empty_entries() -> OrderedDict[str, torch.Tensor]:
    found: OrderedDict[str, torch.Tensor] = OrderedDict()
    found._metadata = OrderedDict()  # type: ignore[attr-defined]
    return found
