"""Who owns what and where it lies: all small cases, each against what it has to mean."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit.layout import (
    Align,
    Piece,
    ShardLayout,
    aligned_shards,
    balanced_owners,
    buckets_by_numel,
    gaps_between,
    greedy_owners,
    segment_layout,
)

WORLDS = range(1, 5)


def _numels(most_items: int, largest: int) -> Iterator[tuple[int, ...]]:
    for items in range(most_items + 1):
        yield from itertools.product(range(largest + 1), repeat=items)


@pytest.mark.parametrize("multiple", [1, 2, 3])
@pytest.mark.parametrize("world_size", WORLDS)
def test_shards_are_torchs_chunks_with_padding(world_size: int, multiple: int) -> None:
    """Every element is in one piece, where ``torch.chunk`` of the padded flat parameter has it."""
    for numels in _numels(3, 5):
        layout = ShardLayout(numels, world_size, multiple)
        n, s = sum(numels), layout.shard_numel
        assert (layout.numel, layout.padded_numel) == (n, world_size * s)
        assert s % multiple == 0
        assert n <= world_size * s < n + world_size * multiple  # no more padding than it takes
        assert sum(layout.padding(r) for r in range(world_size)) == world_size * s - n

        # each element's number, and -1 for padding
        shards = torch.cat([torch.arange(n), torch.full((world_size * s - n,), -1)]).view(world_size, -1)
        for rank in range(world_size):
            assert layout.padding(rank) == int((shards[rank] < 0).sum())
        offsets, found = layout.offsets(), []
        for piece in layout.pieces():
            assert piece.numel > 0
            start = offsets[piece.item] + piece.start
            there = shards[piece.rank, piece.offset : piece.offset + piece.numel].tolist()
            assert there == list(range(start, start + piece.numel))
            assert piece.start + piece.numel <= numels[piece.item]
            found += there
        assert found == list(range(n))


SHAPES = st.lists(
    st.lists(st.integers(0, 6), max_size=3).map(tuple) | st.tuples(st.integers(1, 40), st.integers(1, 7)),
    max_size=7,
)


@settings(max_examples=300)
@given(SHAPES, st.integers(1, 5), st.sampled_from(["parameters", "rows", 1, 3, 8]))
def test_aligned_items_lie_apart_and_where_they_should(
    shapes: list[tuple[int, ...]], world_size: int, align: Align
) -> None:
    layout = aligned_shards(shapes, world_size, align)
    assert layout.numels == tuple(math.prod(shape) for shape in shapes)
    taken = sorted((start, n) for start, n in zip(layout.offsets(), layout.numels, strict=True) if n)
    assert all(start + n <= after for (start, n), (after, _) in itertools.pairwise(taken))
    assert all(start >= 0 and start + n <= layout.padded_numel for start, n in taken)
    pieces = layout.pieces()
    for item, shape in enumerate(shapes):
        cuts = [p.start for p in pieces if p.item == item and p.start]
        if align == "parameters" or (align == "rows" and world_size == 1):
            assert not cuts
        elif align == "rows":
            assert all(cut % math.prod(shape[1:]) == 0 for cut in cuts)
        elif isinstance(align, int):
            assert layout.offsets()[item] % align == 0
            assert world_size == 1 or layout.shard_numel % align == 0
    if align == "parameters" and world_size > 1 and taken:
        loads = [0] * world_size
        balanced_owners(layout.numels, [True] * len(shapes), loads)
        assert layout.shard_numel == max(loads)  # as full as can be
    if isinstance(align, int):
        assert layout.padded_numel - sum(layout.numels) <= (len(shapes) + world_size) * align


def test_end_to_end_is_what_no_alignment_means() -> None:
    for numels in _numels(3, 4):
        shapes = [(n,) for n in numels]
        assert aligned_shards(shapes, 3, None) == ShardLayout(numels, 3)
        assert aligned_shards(shapes, 3, 1).pieces() == ShardLayout(numels, 3).pieces()


def test_rows_cost_little_padding_in_a_transformers_block() -> None:
    width = 64
    block = [(3 * width, width), (3 * width,), (width, width), (width,), (4 * width, width), (4 * width,),
             (width, 4 * width), (width,), (width,), (width,)]  # fmt: skip
    for world_size in (2, 4, 8, 16):
        layout = aligned_shards(block, world_size, "rows")
        assert layout.padded_numel <= 1.1 * sum(layout.numels)


@pytest.mark.parametrize("even", [False, True])
def test_segments_hold_whole_items_in_order(even: bool) -> None:
    for world_size in (1, 2, 3):
        for numels in _numels(3, 3):
            for owners in itertools.product(range(world_size), repeat=len(numels)):
                layout = segment_layout(numels, owners, world_size, even=even)
                needed = [
                    sum(n for n, o in zip(numels, owners, strict=True) if o == rank)
                    for rank in range(world_size)
                ]
                assert layout.sizes == tuple([max(needed)] * world_size if even else needed)
                assert layout.numel == sum(layout.sizes)
                assert [piece.rank for piece in layout.pieces] == list(owners)
                for rank in range(world_size):
                    items = [i for i, owner in enumerate(owners) if owner == rank]
                    assert layout.items_of(rank) == items
                    end = layout.start(rank)
                    assert end == sum(layout.sizes[:rank])
                    for i in items:
                        assert layout.pieces[i] == Piece(i, 0, rank, end - layout.start(rank), numels[i])
                        end += numels[i]
                    assert end <= layout.start(rank) + layout.sizes[rank]


def test_the_least_loaded_rank_is_next() -> None:
    for world_size in (1, 2, 3):
        for numels in _numels(4, 3):
            for trainable in itertools.product([False, True], repeat=len(numels)):
                loads, expected = [0] * world_size, [0] * world_size
                owners = greedy_owners(numels, trainable, loads)
                for owner, numel, is_trainable in zip(owners, numels, trainable, strict=True):
                    assert owner == min(range(world_size), key=lambda r: (expected[r], r))
                    expected[owner] += numel if is_trainable else 1
                assert loads == expected


@settings(max_examples=50)
@given(
    st.lists(st.tuples(st.integers(0, 50), st.booleans()), max_size=20), st.integers(1, 6), st.integers(0, 20)
)
def test_parameters_added_later_move_no_other(
    params: list[tuple[int, bool]], world_size: int, first: int
) -> None:
    numels, trainable = [p[0] for p in params], [p[1] for p in params]
    loads = [0] * world_size
    owners = greedy_owners(numels[:first], trainable[:first], loads)
    owners += greedy_owners(numels[first:], trainable[first:], loads)
    assert owners == greedy_owners(numels, trainable, [0] * world_size)


@settings(max_examples=50)
@given(st.lists(st.integers(0, 50), max_size=30), st.integers(1, 6))
def test_balanced_owners_differ_by_no_more_than_the_smallest_of_the_fullest(
    numels: list[int], world_size: int
) -> None:
    """Without the item that came last to the fullest rank, that rank was the emptiest."""
    loads = [0] * world_size
    owners = balanced_owners(numels, [True] * len(numels), loads)
    assert len(owners) == len(numels)
    assert loads == [sum(n for n, o in zip(numels, owners, strict=True) if o == r) for r in range(world_size)]
    fullest = loads.index(max(loads))
    items = [n for n, o in zip(numels, owners, strict=True) if o == fullest and n]
    assert max(loads) - min(loads) <= min(items, default=0)


def test_buckets_are_as_full_as_their_order_allows() -> None:
    for numels in _numels(5, 3):
        for cap in range(8):
            buckets = buckets_by_numel(numels, cap)
            assert [i for bucket in buckets for i in bucket] == list(range(len(numels)))
            filled = [sum(numels[i] for i in bucket) for bucket in buckets]
            assert all(f <= cap or len(b) == 1 for f, b in zip(filled, buckets, strict=True))
            for (f, _), (_, after) in itertools.pairwise(zip(filled, buckets, strict=True)):
                assert f + numels[after[0]] > cap


def test_gaps_are_what_nothing_fills() -> None:
    size = 5
    spans = [(start, n) for start in range(size + 1) for n in range(1, size + 1 - start)]
    for count in range(4):
        for filled in itertools.combinations_with_replacement(spans, count):
            free = set(range(size)).difference(*(range(s, s + n) for s, n in filled))
            gaps = gaps_between(filled[::-1], size)
            assert [i for s, n in gaps for i in range(s, s + n)] == sorted(free)
            assert all(s + n < after for (s, n), (after, _) in itertools.pairwise(gaps))
