"""Who owns what and where it lies: integer arithmetic only, no tensors and no processes.

Legend: W world size, P numel of all parameters, N numel of a flat buffer, S numel of one rank's part.
"""

from __future__ import annotations

import functools
import itertools
import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal, NamedTuple

from .errors import ConfigurationError

_ALIGNED = 16  # bytes: one load of a device's thread
_TOGETHER = _ALIGNED // 2  # elements of bf16, for layouts that don't know dtypes


def greedy_owners(numels: Sequence[int], trainable: Sequence[bool], loads: list[int]) -> list[int]:
    """Returns the rank of each parameter: always the one with the least load so far (the lowest rank on a tie).

    A frozen parameter weighs 1, so that frozen ones are spread by count. This is fairscale's partition;
    it depends on the order of parameters only, so ranks agree without talking.

    Args:
        numels: numel of each parameter, in optimizer order.
        trainable: whether it requires a gradient.
        loads: numel that each rank holds already, [W]; updated in place, so that parameters added later
            continue from here and no earlier one moves.
    """
    owners = []
    for numel, is_trainable in zip(numels, trainable, strict=True):
        rank = loads.index(min(loads))
        loads[rank] += numel if is_trainable else 1
        owners.append(rank)
    return owners


def balanced_owners(numels: Sequence[int], trainable: Sequence[bool], loads: list[int]) -> list[int]:
    """Assigns as :func:`greedy_owners` does, but the largest parameters first, which evens out the ranks."""
    order = sorted(range(len(numels)), key=lambda i: (-numels[i] if trainable[i] else 0, i))
    placed = greedy_owners([numels[i] for i in order], [trainable[i] for i in order], loads)
    owners = [0] * len(numels)
    for i, rank in zip(order, placed, strict=True):
        owners[i] = rank
    return owners


def rounded_up(numel: int, step: int) -> int:
    """Returns the next multiple of a step."""
    return -(-numel // step) * step


class Piece(NamedTuple):
    """The part of one item that lies in one rank's part of a flat buffer."""

    item: int
    start: int  # first element within the item; of one in several runs, as its pieces lie rank by rank
    rank: int
    offset: int  # within the rank's part
    numel: int
    runs: int = 1  # of the item's elements that it consists of


class Listed(NamedTuple):
    """Says how a rank lists its part of one item.

    Attributes:
        layout: of the item alone.
        offset: where the part begins in the rank's shard.
    """

    layout: ShardLayout
    offset: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class SegmentLayout:
    """A flat buffer [N] that holds whole items grouped by owner: rank 0's segment, rank 1's, ...

    Attributes:
        pieces: place of each item, in item order.
        sizes: numel of each rank's segment, [W].
    """

    pieces: tuple[Piece, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        return sum(self.sizes)

    def start(self, rank: int) -> int:
        return sum(self.sizes[:rank])

    def items_of(self, rank: int) -> list[int]:
        """Indices of the items in a rank's segment, in buffer order."""
        return [p.item for p in self.pieces if p.rank == rank]


def alignment(itemsize: int) -> int:
    """Returns the elements of so many bytes between addresses at which devices copy and compute fastest."""
    return max(1, _ALIGNED // itemsize)


def segment_layout(
    numels: Sequence[int], owners: Sequence[int], world_size: int, *, even: bool = False, step: int = 1
) -> SegmentLayout:
    """Lays items out by owner, in item order within an owner's segment.

    Args:
        owners: rank of each item.
        even: pad every segment at its end to the size of the largest.
        step: items and segments begin at multiples of it.
    """
    sizes = [0] * world_size
    pieces = []
    for item, (numel, rank) in enumerate(zip(numels, owners, strict=True)):
        pieces.append(Piece(item, 0, rank, sizes[rank], numel))
        sizes[rank] += rounded_up(numel, step)
    return SegmentLayout(tuple(pieces), tuple([max(sizes)] * world_size if even else sizes))


def buckets_by_size(sizes: Sequence[int], cap: int, kinds: Sequence[object] = ()) -> list[list[int]]:
    """Fills consecutive items into buckets of at most so large a sum; a larger item gets its own.

    ``cap=0`` puts every item in a bucket of its own.

    Args:
        kinds: of the items, if only those of one kind go together; one of the kind None gets its own bucket.
    """
    buckets: list[list[int]] = []
    filled, last = 0, None
    for i, (size, kind) in enumerate(zip(sizes, kinds or [0] * len(sizes), strict=True)):
        if kind is None or kind != last or filled + size > cap:
            buckets.append([])
            filled = 0
        buckets[-1].append(i)
        filled, last = filled + size, kind
    return buckets


@dataclass(frozen=True)
class ShardLayout:
    """Items as one flat parameter [N], cut into W shards of equal size [S]; the end is padded.

    S is N / W rounded up, as ``torch.chunk`` cuts; with items end to end this is fairscale's layout.

    Attributes:
        multiple: S is rounded up to a multiple of it.
        starts: where each item begins; None: items lie end to end.
        grains: of each item so many elements that no cut goes through; None: cuts may be anywhere.
        cuts: where each rank's part ends, [W], if parts differ in size; None: each has S.
        copies: every rank's part has the whole item, a single number.
        runs: each part consists of so many runs of the item's elements: it is cut along a later dimension, evenly. Of
            packed items the most.
    """

    numels: tuple[int, ...]
    world_size: int
    multiple: int = 1
    starts: tuple[int, ...] | None = None
    grains: tuple[int, ...] | None = None
    cuts: tuple[int, ...] | None = None
    copies: bool = False
    runs: int = 1

    @functools.cached_property
    def numel(self) -> int:
        """Returns N: up to the end of the last item, without the padding after it."""
        return max((start + n for start, n in zip(self.offsets(), self.numels, strict=True)), default=0)

    @functools.cached_property
    def shard_numel(self) -> int:
        return -(-self.numel // (self.world_size * self.multiple)) * self.multiple

    @functools.cached_property
    def padded_numel(self) -> int:
        """Returns W times S; where parts differ in size, nothing is padded."""
        return self.shard_numel * self.world_size if self.cuts is None else self.numel

    @property
    def sizes(self) -> list[int] | None:
        """Returns the numel of each rank's part, [W], if parts differ in size."""
        if self.cuts is None:
            return None
        return [end - begin for begin, end in zip((0, *self.cuts), self.cuts, strict=False)]

    def part(self, rank: int) -> slice:
        """Finds where a rank's part lies in the flat parameter."""
        if self.copies:
            return slice(0, 1)
        if self.cuts is None:
            return slice(rank * self.shard_numel, (rank + 1) * self.shard_numel)
        return slice(self.cuts[rank - 1] if rank else 0, self.cuts[rank])

    @functools.cached_property
    def copied(self) -> frozenset[int]:
        """Finds the items of which every rank's part has the whole."""
        return frozenset(item for item, block in self.blocks if block.copies)

    def padding(self, rank: int) -> int:
        """Returns how many elements at the end of a rank's shard lie behind the last item."""
        part = self.part(rank)
        return part.stop - part.start - max(0, min(part.stop, self.numel) - part.start)

    def offsets(self) -> list[int]:
        """Lists where each item starts in the flat parameter."""
        if self.starts is not None:
            return list(self.starts)
        return list(accumulate(self.numels, initial=0))[:-1]

    @functools.cached_property
    def parts(self) -> tuple[list[int], list[int]]:
        """Cuts it into items and what is between them: the numel of each of these, and which of them each item is."""
        sizes, numbers, end = list[int](), [0] * len(self.numels), 0
        for start, numel, item in sorted(zip(self.offsets(), self.numels, itertools.count(), strict=False)):
            if start > end:
                sizes.append(start - end)
            numbers[item], end = len(sizes), start + numel
            sizes.append(numel)
        return sizes, numbers

    def described(self) -> list[object]:
        """Describes it as data to compare: the numels; if items don't lie end to end, (start, numel) of each."""
        if self.starts is None:
            return list(self.numels)
        return [[start, numel] for start, numel in zip(self.starts, self.numels, strict=True)]

    @functools.cached_property
    def _of_ranks(self) -> dict[int, Mapping[int, Piece]]:
        return {}

    def of_rank(self, rank: int) -> Mapping[int, Piece]:
        """Returns a rank's pieces, by item."""
        if rank not in self._of_ranks:
            self._of_ranks[rank] = {p.item: p for p in self.pieces() if p.rank == rank}
        return self._of_ranks[rank]

    def pieces(self, apart: bool = False) -> list[Piece]:
        """Returns all items cut at the borders of shards, in order; items without elements have none.

        Args:
            apart: of those that consist of several runs each run alone.
        """
        if self.copies:
            return [Piece(0, 0, rank, 0, 1) for rank in range(self.world_size)]
        if apart and self.runs > 1:
            size = self.shard_numel // self.runs
            each = [(run, rank) for run in range(self.runs) for rank in range(self.world_size)]
            return [
                Piece(0, (run * self.world_size + rank) * size, rank, run * size, size) for run, rank in each
            ]
        found = []
        for item, (start, numel) in enumerate(zip(self.offsets(), self.numels, strict=True)):
            done = 0
            while done < numel:
                at = start + done
                if self.cuts is None:
                    rank, offset = divmod(at, self.shard_numel)
                    left = self.shard_numel - offset
                else:
                    rank = bisect_right(self.cuts, at)
                    offset, left = at - self.part(rank).start, self.cuts[rank] - at
                length = min(numel - done, left)
                found.append(Piece(item, done, rank, offset, length, self.runs))
                done += length
        return found

    @property
    def blocks(self) -> Sequence[tuple[int, ShardLayout]]:
        """Lists layouts whose shards lie one after the other in one of this, each with its first item's number."""
        return ((0, self),)

    def listed(self, shapes: Sequence[Sequence[int]], rank: int) -> Sequence[Listed]:
        """Says how a rank lists its part of each item; where cuts may be anywhere, there is one item."""
        if self.world_size == 1:
            return [
                Listed(ShardLayout((numel,), 1), start, tuple(shape))
                for start, numel, shape in zip(self.offsets(), self.numels, shapes, strict=True)
            ]
        if self.grains is None:
            return [Listed(self, 0, (self.shard_numel,))]
        return _listed_rows(self, tuple(map(tuple, shapes)), rank)


@dataclass(frozen=True)
class PackedLayout(ShardLayout):
    """Items of which each rank has an even part, packed: a shard [S] is a part of the first item, of the second, ...

    What is gathered, [W * S] rank by rank, has an item in W places, and is put together ([Note: packed shards] of
    ``flat_param.py``). Where items begin is where they lie then, each with its own padding behind it: a shard's order.

    Attributes:
        each: the layout of each item.
    """

    each: tuple[ShardLayout, ...] = ()

    @functools.cached_property
    def shard_numel(self) -> int:
        return sum(one.shard_numel for one in self.each)

    @functools.cached_property
    def blocks(self) -> Sequence[tuple[int, ShardLayout]]:
        return [(k, self.each[k]) for k in sorted(range(len(self.each)), key=self.offsets().__getitem__)]

    def listed(self, shapes: Sequence[Sequence[int]], rank: int) -> Sequence[Listed]:
        if self.world_size == 1:
            return super().listed(shapes, rank)
        return [
            Listed(one, start // self.world_size, (one.shard_numel,))
            for one, start in zip(self.each, self.offsets(), strict=True)
        ]

    def pieces(self, apart: bool = False) -> list[Piece]:
        """Returns the parts of all items, without padding."""
        return [
            p._replace(item=item, offset=start // self.world_size + p.offset)
            for item, (one, start) in enumerate(zip(self.each, self.offsets(), strict=True))
            for p in one.pieces(apart)
        ]


def packed_layout(each: Sequence[ShardLayout]) -> ShardLayout:
    """Lays out items of one layout each (and one item) as one flat parameter."""
    if len(each) == 1:
        return replace(each[0], grains=None)  # it is listed as packed ones are
    order = sorted(range(len(each)), key=lambda k: _misaligns(each[k].padded_numel))
    ends = dict(zip(order, accumulate([each[k].padded_numel for k in order]), strict=True))
    starts = tuple(ends[k] - one.padded_numel for k, one in enumerate(each))
    numels = tuple(one.numels[0] for one in each)
    return PackedLayout(numels, each[0].world_size, starts=starts, each=tuple(each))


def in_runs(layout: ShardLayout, runs: Sequence[int]) -> ShardLayout:
    """Returns the same where so many runs of each item are a rank's part of it."""
    if not isinstance(layout, PackedLayout):
        return replace(layout, runs=runs[0])
    each = tuple(replace(one, runs=n) for one, n in zip(layout.each, runs, strict=True))
    return replace(layout, each=each, runs=max(runs))


Align = Literal["parameters", "rows"] | int | None


def aligned_shards(shapes: Sequence[Sequence[int]], world_size: int, align: Align) -> ShardLayout:
    """Cuts items of these shapes so that less of them straddles shards, or so that they begin at aligned addresses.

    Args:
        align: "parameters": each item lies in one shard as a whole, and items change places so that shards are as full
            as can be; S is at least the largest item. "rows": no cut goes through a row (of the first dimension). A
            number: items begin, and S is, at multiples of so many elements. None: fairscale's layout, end to end.
    """
    numels = tuple(math.prod(shape) for shape in shapes)
    if align is None or (world_size == 1 and isinstance(align, str)):
        return ShardLayout(numels, world_size)
    if align == "parameters":
        owners = balanced_owners(numels, [True] * len(numels), [0] * world_size)
        segments = segment_layout(numels, owners, world_size, even=True)
        size = max(1, segments.sizes[0])
        return ShardLayout(numels, world_size, size, tuple(p.rank * size + p.offset for p in segments.pieces))
    if align == "rows":
        return _cut_between_rows(numels, [max(1, math.prod(shape[1:])) for shape in shapes], world_size)
    starts, end = [], 0
    for numel in numels:
        starts.append(rounded_up(end, align))
        end = starts[-1] + numel
    return ShardLayout(numels, world_size, 1 if world_size == 1 else align, tuple(starts))


def _cut_between_rows(
    numels: Sequence[int], rows: Sequence[int], world_size: int, step: int = 1
) -> ShardLayout:
    """Places items so that the next cut is at one of an item's rows; two cuts within it are whole rows apart.

    S is a multiple of ``step``.
    """
    even = max(1, -(-sum(numels) // world_size))
    step = math.lcm(step, *[row for row, numel in zip(rows, numels, strict=True) if numel > even])
    size = rounded_up(even, step)
    while True:
        starts, end = [], 0
        for numel, row in zip(numels, rows, strict=True):
            room = rounded_up(end, size) - end  # up to the next cut
            starts.append(end + (room % row if numel > room else 0))
            end = starts[-1] + numel
        if end <= size * world_size:
            return ShardLayout(tuple(numels), world_size, size, tuple(starts), tuple(rows))
        size += step


_NEGLIGIBLE = 0.006  # of a unit
_FEW = 64  # elements a rank, as long as that is less than a quarter of a unit


@functools.lru_cache(maxsize=256)  # a model has many units of the same shapes
def rows_layout(shapes: tuple[tuple[int, ...], ...], world_size: int, block: int = 1) -> ShardLayout:
    """Lays out items as one flat parameter whose cuts are between rows (of the first dimension): ranks have whole ones.

    Items may change places, since fewer gaps are needed then: as they come, long rows first, or short rows first,
    whichever pads least; those that would misalign the ones behind them come last. Vectors are cut anywhere. Where rows
    are so long that more than 0.6 % (and some elements a rank) would be padding, the longest are cut too, at the
    largest common part of rows that pads less.

    Args:
        block: so many rows stay together.
    """
    numels = tuple(math.prod(shape) for shape in shapes)
    rows = [max(1, math.prod(shape[1:])) if len(shape) > 1 else 1 for shape in shapes]
    grains = tuple(row if len(shape) < 2 else row * block for row, shape in zip(rows, shapes, strict=True))
    if world_size == 1:
        return replace(_with_least_padding(numels, grains, 1), multiple=1)
    limits = sorted({grain for grain in grains if grain > 1} or {1}, reverse=True)
    while limits[-1] > 1:  # then parts of the shortest row
        limits.append(limits[-1] // 2)
    allowed = max(_NEGLIGIBLE * sum(numels), min(_FEW * world_size, sum(numels) // 4))
    found: list[ShardLayout] = []
    for limit in limits:
        cut = tuple(
            grain if grain <= limit else row if row <= limit else math.gcd(row, limit)
            for grain, row in zip(grains, rows, strict=True)
        )
        found.append(_with_least_padding(numels, cut, world_size))
        if found[-1].padded_numel - sum(numels) <= allowed:
            return found[-1]
    return min(found, key=lambda layout: layout.padded_numel)


def _misaligns(numel: int, grain: int = 1) -> int:
    """Says whether items behind this one may begin off a multiple of 16 bytes: 1 by a gap in front of it, 2 by its end.

    A product with a matrix in bf16 that begins off one took 3 to 7 times as long on a device where it was measured.
    """
    return 2 if numel % _TOGETHER else int(grain % _TOGETHER > 0 and _TOGETHER % grain > 0)


def _with_least_padding(numels: tuple[int, ...], grains: tuple[int, ...], world_size: int) -> ShardLayout:
    # where cuts are odd, gaps in front of rows are; in small units that isn't worth the padding
    step = _TOGETHER if sum(numels) >= _FEW * world_size else 1
    late, found = list(map(_misaligns, numels, grains)), list[ShardLayout]()
    for length in (0, -1, 1):
        order = sorted(range(len(numels)), key=lambda k: (late[k], length * grains[k]))
        placed = _cut_between_rows([numels[k] for k in order], [grains[k] for k in order], world_size, step)
        starts = [start for _, start in sorted(zip(order, placed.starts or (), strict=True))]
        found.append(ShardLayout(numels, world_size, placed.multiple, tuple(starts), grains))
    return min(found, key=lambda layout: layout.padded_numel)


def _is_count(align: Align) -> bool:
    return isinstance(align, int) and not isinstance(align, bool) and align >= 1


@dataclass(frozen=True)
class AlignedLayout:
    """Cuts parameters, as ``Options.layout``; see :func:`aligned_shards`."""

    align: Align

    def __post_init__(self) -> None:
        if self.align not in ("parameters", "rows", None) and not _is_count(self.align):
            raise ConfigurationError(
                f'align={self.align!r}: expected "parameters", "rows", a number of elements from 1, or None'
            )

    def __call__(self, shapes: Sequence[Sequence[int]], world_size: int) -> ShardLayout:
        return aligned_shards(shapes, world_size, self.align)


@dataclass(frozen=True)
class RowsLayout:
    """Cuts between rows, for ``Options.layout``; see :func:`rows_layout`."""

    align: Align = None

    def __post_init__(self) -> None:
        if self.align not in ("rows", None) and not _is_count(self.align):
            raise ConfigurationError(
                f'align={self.align!r}: expected "rows", a number of rows from 1 that stay together, or None. '
                'align="parameters" is for FSDP(module), which lists a flat parameter'
            )

    def __call__(self, shapes: Sequence[Sequence[int]], world_size: int) -> ShardLayout:
        block = self.align if isinstance(self.align, int) else 1
        return rows_layout(tuple(map(tuple, shapes)), world_size, block)


@dataclass(frozen=True)
class EachAlone:
    """Cuts each parameter by itself, for ``Options.layout``: shards are packed.

    Attributes:
        copies_numbers: every rank has parameters without dimensions.
    """

    cut: Callable[[Sequence[Sequence[int]], int], ShardLayout]
    copies_numbers: bool = False

    def __call__(self, shapes: Sequence[Sequence[int]], world_size: int) -> ShardLayout:
        each = [self.cut([shape], world_size) for shape in shapes]
        if self.copies_numbers and world_size > 1:
            each = [
                one if shape else replace(one, copies=True) for one, shape in zip(each, shapes, strict=True)
            ]
        return packed_layout(each)


@functools.lru_cache(maxsize=256)  # as above
def _listed_rows(layout: ShardLayout, shapes: tuple[tuple[int, ...], ...], rank: int) -> Sequence[Listed]:
    found = []
    borders = [layout.shard_numel * r for r in range(layout.world_size + 1)]
    begin = borders[rank]
    for start, numel, shape, grain in zip(
        layout.offsets(), layout.numels, shapes, layout.grains or (), strict=True
    ):
        cuts = tuple([min(max(border - start, 0), numel) for border in borders])
        here = cuts[rank + 1] - cuts[rank]
        offset = max(start - begin, 0) if here else 0
        alone = ShardLayout((numel,), layout.world_size, cuts=cuts[1:])
        found.append(Listed(alone, offset, local_shape(shape, grain, here)))
    return found


def local_shape(shape: Sequence[int], grain: int, numel: int) -> tuple[int, ...]:
    """Returns the shape in which a rank lists a part of an item: its rows, with as many dimensions as the item has.

    Args:
        grain: so many elements are a row, or a block of rows, or where rows are cut a part of one.
    """
    if len(shape) < 2 or numel == math.prod(shape):
        return tuple(shape) if len(shape) > 1 else (numel,)
    row = math.prod(shape[1:])
    if grain % row == 0:
        return (numel // max(1, row), *shape[1:])
    return (numel // grain, grain, *(1 for _ in shape[2:]))


def gaps_between(filled: Sequence[tuple[int, int]], numel: int) -> list[tuple[int, int]]:
    """Lists what these parts, as (start, numel), leave free of a buffer, in the same form and in order."""
    gaps, end = [], 0
    for start, length in [*sorted(filled), (numel, 0)]:
        if start > end:
            gaps.append((end, start - end))
        end = max(end, start + length)
    return gaps


class Box(NamedTuple):
    """A part of a tensor whose elements lie one after the other.

    Attributes:
        offsets: of its first element, one for each of the tensor's dimensions.
        sizes: how far it goes in each.
        start: elements that come before it where it lies: in a shard, or in a file.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int = 0

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    def meet(self, other: Box) -> Box | None:
        """Returns what two boxes of a tensor have in common; None for nothing."""
        first = tuple(max(a, b) for a, b in zip(self.offsets, other.offsets, strict=True))
        ends = (
            min(a + m, b + n)
            for a, m, b, n in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        )
        sizes = tuple(end - begin for begin, end in zip(first, ends, strict=True))
        return None if any(size <= 0 for size in sizes) else Box(first, sizes)


def whole_box(shape: Sequence[int]) -> Box:
    """Returns the box that is all of a tensor of a shape."""
    return Box((0,) * len(shape), tuple(shape))


def boxes_of(shape: Sequence[int], first: int, numel: int, start: int = 0) -> list[Box]:
    """Returns the boxes of a run of elements of a contiguous tensor, in order.

    Args:
        first: number of the first element.
        start: added to the boxes' own.
    """
    if not numel:
        return []
    if len(shape) < 2:
        return [Box((first,) * len(shape), (numel,) * len(shape), start)]
    found: list[Box] = []
    row = math.prod(shape[1:])
    while numel:
        at, within = divmod(first, row)
        if within == 0 and numel >= row:
            rows = numel // row
            taken = rows * row
            found.append(Box((at, *(0,) * (len(shape) - 1)), (rows, *shape[1:]), start))
        else:
            taken = min(numel, row - within)
            found += [
                Box((at, *box.offsets), (1, *box.sizes), box.start)
                for box in boxes_of(shape[1:], within, taken, start)
            ]
        first, numel, start = first + taken, numel - taken, start + taken
    return found


def boxes_of_piece(shape: Sequence[int], piece: Piece) -> list[Box]:
    """Returns the boxes of a piece of a contiguous tensor, where they lie in the part of the piece's rank."""
    if piece.runs == 1:
        return boxes_of(shape, piece.start, piece.numel, piece.offset)
    dim = max(d for d in range(len(shape)) if math.prod(shape[:d]) == piece.runs)
    slices = piece.runs * math.prod(shape[dim + 1 :])  # elements at one place of this dimension
    first, size = piece.start // slices, piece.numel // slices
    offsets = tuple(first if d == dim else 0 for d in range(len(shape)))
    return [Box(offsets, (*shape[:dim], size, *shape[dim + 1 :]), piece.offset)]
