"""Values of a flat parameter's items: put together as its layout has them, and taken apart.

Legend: W world size, S shard numel, N numel of the flat parameter.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from ..backend import Group
from ..errors import ConfigurationError
from ..layout import Align, ShardLayout, aligned_shards, packed_layout, rows_layout

logger = logging.getLogger("shardkit")

_MUCH = 0.1  # of what is stored
_WORTH = 2**16  # elements; less is nothing to warn of


def _is_count(align: Align) -> bool:
    return isinstance(align, int) and not isinstance(align, bool) and align >= 1


@dataclass(frozen=True)
class AlignedLayout:
    """Cuts parameters, as ``Options.layout``; see :func:`~shardkit.layout.aligned_shards`."""

    align: Align

    def __post_init__(self) -> None:
        if self.align not in ("parameters", "rows", None) and not _is_count(self.align):
            raise ConfigurationError(
                f'align={self.align!r}: expected "parameters", "rows", a number of elements from 1, or None'
            )

    def __call__(self, shapes: Sequence[torch.Size], world_size: int) -> ShardLayout:
        return aligned_shards(shapes, world_size, self.align)


@dataclass(frozen=True)
class RowsLayout:
    """Cuts between rows, for ``Options.layout``; see :func:`~shardkit.layout.rows_layout`."""

    align: Align = None

    def __post_init__(self) -> None:
        if self.align not in ("rows", None) and not _is_count(self.align):
            raise ConfigurationError(
                f'align={self.align!r}: expected "rows", a number of rows from 1 that stay together, or None. '
                'align="parameters" is for FSDP(module), which lists a flat parameter'
            )

    def __call__(self, shapes: Sequence[torch.Size], world_size: int) -> ShardLayout:
        block = self.align if isinstance(self.align, int) else 1
        return rows_layout(tuple(map(tuple, shapes)), world_size, block)


@dataclass(frozen=True)
class EachAlone:
    """Cuts each parameter by itself, for ``Options.layout``: shards are packed.

    Attributes:
        copies_numbers: every rank has parameters without dimensions.
    """

    cut: Callable[[Sequence[torch.Size], int], ShardLayout]
    copies_numbers: bool = False

    def __call__(self, shapes: Sequence[torch.Size], world_size: int) -> ShardLayout:
        each = [self.cut([shape], world_size) for shape in shapes]
        if self.copies_numbers and world_size > 1:
            each = [
                one if shape else replace(one, copies=True) for one, shape in zip(each, shapes, strict=True)
            ]
        return packed_layout(each)


def taken_apart(values: torch.Tensor, layout: ShardLayout) -> list[torch.Tensor]:
    """Returns the items in [N or more], each in one dimension: views."""
    sizes, numbers = layout.parts
    parts = torch.split_with_sizes(values, [*sizes, values.numel() - layout.numel])
    return list(map(parts.__getitem__, numbers))


def put_together(rows: Sequence[torch.Tensor], layout: ShardLayout) -> torch.Tensor:
    """Returns items of any shape as the flat parameter [W * S]; zeros are between and behind them."""
    sizes, numbers = layout.parts
    placed: dict[int, torch.Tensor] = {}
    for number, row in zip(numbers, rows, strict=True):
        placed[number] = row.reshape(-1)
    for number, size in enumerate([*sizes, layout.padded_numel - layout.numel]):
        if number not in placed and size:
            placed[number] = rows[0].new_zeros(size)
    return torch.cat(list(map(placed.__getitem__, sorted(placed))))


def own_part(values: torch.Tensor, group: Group) -> torch.Tensor:
    """Returns this rank's part of values [W * S], rank by rank, [S]: a view, or where execution is lazy a copy.

    There, which part it is is data, so that all ranks build one graph.
    """
    if not group.backend.has_storage:
        rank = torch.tensor([group.rank]).to(values.device)
        return values.view(group.world_size, -1).index_select(0, rank).view(-1)
    size = values.numel() // group.world_size
    return values[group.rank * size : (group.rank + 1) * size]


def own_shard(values: torch.Tensor, layout: ShardLayout, group: Group) -> torch.Tensor:
    """Returns this rank's shard [S] of a flat parameter's values, items in their places; a view where possible."""
    if type(layout) is ShardLayout and layout.runs == 1 and not layout.copies:
        return own_part(values, group)
    blocks = values.split([block.padded_numel for block in layout.blocks])
    parts = [
        block[:1]
        if alone.copies
        else own_part(block if alone.runs == 1 else rank_by_rank(block, alone), group)
        for block, alone in zip(blocks, layout.blocks, strict=True)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def rank_by_rank(values: torch.Tensor, layout: ShardLayout) -> torch.Tensor:
    """Orders one item's elements as the ranks' parts of it follow each other, where these consist of several runs."""
    return _as_parts(values.reshape(-1), layout).reshape(-1)


def _as_parts(values: torch.Tensor, layout: ShardLayout) -> torch.Tensor:
    """Views one item as the ranks' parts of it, [W, numel], or [W, runs, numel of a run]."""
    if layout.runs == 1:
        return values.view(layout.world_size, -1)
    return values.view(layout.runs, layout.world_size, -1).transpose(0, 1)


class Unpacking:
    """Puts the items of a packed flat parameter into their places; see [Note: packed shards].

    Args:
        layout: of the flat parameter.
        full: where items lie, [W * S].
    """

    def __init__(self, layout: ShardLayout, full: torch.Tensor) -> None:
        world_size, self._sizes = layout.world_size, [block.shard_numel for block in layout.blocks]
        items = full.split([block.padded_numel for block in layout.blocks])
        self._places = [_as_parts(item, block) for item, block in zip(items, layout.blocks, strict=True)]
        self._world_size = world_size
        self._in_runs = layout.runs > 1

    def unpack(self, gathered: torch.Tensor) -> None:
        """Copies what was gathered, [W, S] or [W * S] rank by rank: one operation."""
        rows = gathered if gathered.dim() == 2 else gathered.view(self._world_size, -1)
        if not self._in_runs:
            torch.split_with_sizes_copy(rows, self._sizes, dim=1, out=self._places)
            return
        parts = torch.split_with_sizes(rows, self._sizes, dim=1)
        shaped = [part.view(place.shape) for part, place in zip(parts, self._places, strict=True)]
        torch._foreach_copy_(self._places, shaped)


def unpacked(gathered: torch.Tensor, layout: ShardLayout) -> torch.Tensor:
    """Puts items in their places, of values gathered rank by rank, [W * S]."""
    if len(layout.blocks) == 1 and layout.runs == 1:
        return gathered
    made = torch.empty_like(gathered)
    Unpacking(layout, made).unpack(gathered)
    return made


def report_padding(layouts: Sequence[tuple[Sequence[str], ShardLayout]]) -> None:
    """Logs what alignment of these parameters costs in memory and on the wire; warns if that is much."""
    shown = logger.getEffectiveLevel()
    for names, layout in layouts:
        padding = 0 if layout.starts is None else layout.padded_numel - sum(layout.numels)
        share = padding / max(1, layout.padded_numel)
        level = logging.WARNING if share > _MUCH and padding > _WORTH else logging.INFO
        if padding and level >= shown:
            what = f"{names[0]!r} and {len(names) - 1} more parameters"
            text = "the alignment of %s costs %d elements of padding, %.1f %% of the flat parameter"
            logger.log(level, text, what, padding, 100 * share)
