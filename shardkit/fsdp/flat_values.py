"""Values of a flat parameter's items: put together as its layout has them, and taken apart.

Legend: W world size, S shard numel, N numel of the flat parameter.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..errors import ConfigurationError
from ..layout import Align, ShardLayout, aligned_shards, gaps_between

logger = logging.getLogger("shardkit")

_MUCH = 0.1  # of what is stored
_WORTH = 2**16  # elements; less is nothing to warn of


@dataclass(frozen=True)
class AlignedLayout:
    """How parameters are cut, for ``Options.layout``; see :func:`~shardkit.layout.aligned_shards`."""

    align: Align

    def __post_init__(self) -> None:
        if self.align in ("parameters", "rows", None):
            return
        if isinstance(self.align, str | bool) or not isinstance(self.align, int) or self.align < 1:
            raise ConfigurationError(
                f'align={self.align!r}: expected "parameters", "rows", a number of elements from 1, or None'
            )

    def __call__(self, shapes: Sequence[torch.Size], world_size: int) -> ShardLayout:
        return aligned_shards(shapes, world_size, self.align)


def taken_apart(values: torch.Tensor, layout: ShardLayout) -> list[torch.Tensor]:
    """The items in [N or more], each in one dimension: views."""
    if layout.starts is None:
        numels = layout.numels
        parts = torch.split_with_sizes(values, [*numels, values.numel() - sum(numels)])
        return list(parts[: len(numels)])
    return [values[start : start + n] for start, n in zip(layout.starts, layout.numels, strict=True)]


def put_together(rows: Sequence[torch.Tensor], layout: ShardLayout) -> torch.Tensor:
    """Items, each in one dimension, as the flat parameter [W * S]; zeros are between and behind them."""
    placed = list(zip(layout.offsets(), rows, strict=True))
    gaps = gaps_between([(start, row.numel()) for start, row in placed], layout.padded_numel)
    placed += [(start, rows[0].new_zeros(numel)) for start, numel in gaps]
    return torch.cat([row for _, row in sorted(placed, key=lambda part: part[0])])


def layout_for(align: Align, flatten: bool) -> AlignedLayout | None:
    """That of ``align``, None for the default.

    Raises:
        ConfigurationError: no such alignment, or none for parameters that are cut one by one.
    """
    if align == "parameters" and not flatten:
        raise ConfigurationError(
            'align="parameters" keeps parameters of a flat parameter whole, each on one rank; here each parameter is '
            'a flat parameter of its own, which one rank would hold alone. Use align="rows", or FSDP(module) with '
            "flatten=True"
        )
    return None if align is None else AlignedLayout(align)


def report_padding(layout: ShardLayout, what: str, rank: int) -> None:
    """Logs what alignment costs in memory and on the wire; warns if that is much."""
    if layout.starts is None or rank:
        return
    padding = layout.padded_numel - sum(layout.numels)
    share = padding / max(1, layout.padded_numel)
    logger.log(
        logging.WARNING if share > _MUCH and padding > _WORTH else logging.INFO,
        "the alignment of %s costs %d elements of padding, %.1f %% of the flat parameter",
        what, padding, 100 * share,
    )  # fmt: skip
